"""Numbers and tensors on a socket, in a form that cannot execute code.

Idea    A frame is a header in JSON and the bytes of tensors. Reading one makes numbers, texts, lists, dicts and plain
        tensors of known dtypes, and nothing else, whoever has written it; sizes are limited before memory is taken.
Read    `ranks.py` and `switch.py`, the two ends of a socket.
"""

from __future__ import annotations

import json
import struct
from socket import socket
from typing import Any

import torch
from torch import Tensor

LONGEST_HEADER, MOST_BYTES = 1 << 20, 1 << 28
SIZES = struct.Struct("<II")  # bytes of the header, bytes of all tensors
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
}


class FrameError(Exception):
    """What was sent is no frame, or too large a one."""


def pack(value: Any) -> bytes:
    """The frame of a value. Raises `FrameError` for anything but numbers, texts, lists, dicts and tensors."""
    tensors: list[bytes] = []
    try:
        header = json.dumps(_flat(value, tensors)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(str(error)) from None
    body = b"".join(tensors)
    if len(header) > LONGEST_HEADER or len(body) > MOST_BYTES:
        raise FrameError(f"{len(header) + len(body):,} bytes are too many")
    return SIZES.pack(len(header), len(body)) + header + body


def _flat(value: Any, tensors: list[bytes]) -> Any:
    """The value with each tensor replaced by its shape and dtype; its bytes go to `tensors`."""
    kind = type(value)  # and not isinstance: a subclass may say of itself what it likes
    if kind in (Tensor, torch.nn.Parameter):
        name = str(value.dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise FrameError(f"a tensor of {value.dtype} cannot be handed back")
        plain = Tensor.contiguous(Tensor.cpu(Tensor.detach(value)))
        tensors.append(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        return {"tensor": list(plain.shape), "dtype": name}
    if kind is dict:
        return {"dict": [[str(key), _flat(part, tensors)] for key, part in value.items()]}
    if kind in (list, tuple):
        return [_flat(part, tensors) for part in value]
    if value is None or kind in (bool, int, float, str):
        return value
    raise FrameError(f"a {kind.__name__} cannot be handed back: return tensors, numbers, or lists and dicts of them")


def unpack(header: bytes, body: bytes) -> Any:
    """The value of a frame. Raises `FrameError`."""
    try:
        value, used = _deep(json.loads(header), body, 0)
    except (ValueError, KeyError, TypeError, RecursionError, RuntimeError) as error:
        raise FrameError(str(error)) from None
    if used != len(body):
        raise FrameError("bytes are left over")
    return value


def _deep(value: Any, body: bytes, used: int) -> tuple[Any, int]:
    if isinstance(value, dict) and "tensor" in value:
        shape, dtype = [int(size) for size in value["tensor"]], DTYPES[value["dtype"]]
        number = 1
        for size in shape:
            number *= size
        length = number * dtype.itemsize
        if min(shape, default=0) < 0 or used + length > len(body):
            raise FrameError("a tensor is longer than its bytes")
        if not length:
            return torch.empty(shape, dtype=dtype), used
        plain = torch.frombuffer(bytearray(body[used : used + length]), dtype=dtype)
        return plain.reshape(shape), used + length
    if isinstance(value, dict):
        found = {}
        for key, part in value["dict"]:
            found[str(key)], used = _deep(part, body, used)
        return found, used
    if isinstance(value, list):
        parts = []
        for part in value:
            one, used = _deep(part, body, used)
            parts.append(one)
        return parts, used
    return value, used


def send(connection: socket, value: Any) -> None:
    """Send a frame, whole."""
    connection.sendall(pack(value))


def receive(connection: socket) -> Any:
    """The next frame; blocks. Raises `EOFError` at the end, `FrameError` for what is none."""
    header, body = SIZES.unpack(_exactly(connection, SIZES.size))
    if header > LONGEST_HEADER or body > MOST_BYTES:
        raise FrameError("a frame is too large")
    return unpack(_exactly(connection, header), _exactly(connection, body))


def _exactly(connection: socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        piece = connection.recv(min(1 << 20, size - len(parts)))
        if not piece:
            raise EOFError
        parts += piece
    return bytes(parts)


class Reader:
    """Frames out of pieces of bytes, as they come: for the end that must not block."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> list[Any]:
        """The frames that are whole now. Raises `FrameError`."""
        self._bytes += piece
        found = []
        while len(self._bytes) >= SIZES.size:
            header, body = SIZES.unpack_from(self._bytes)
            if header > LONGEST_HEADER or body > MOST_BYTES:
                raise FrameError("a frame is too large")
            end = SIZES.size + header + body
            if len(self._bytes) < end:
                break
            start = SIZES.size + header
            found.append(unpack(bytes(self._bytes[SIZES.size : start]), bytes(self._bytes[start:end])))
            del self._bytes[:end]
        return found
