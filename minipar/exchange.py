"""A checkpoint as one plain file of whole weights, and such a file as the beginning of a run.

    minipar export run weights.safetensors
    minipar train --init weights.safetensors --dp 4 --zero 3

Idea    Checkpoints hold the pieces that ranks held. Others want whole weights by the names of the model: one rank reads
        the pieces, puts them together and writes them down. The way back is easier still: each rank takes its pieces
        out of the file, which is mapped and not read as a whole.
Source  safetensors (github.com/huggingface/safetensors): the format in which weights are shared; no code in it can run.
Read    `checkpoint.py` before.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

import torch

from minipar import checkpoint, launch
from minipar.checkpoint import Saved, canonical_names
from minipar.files import write_whole
from minipar.mesh import Mesh, plan
from minipar.model import GPT, GPTConfig
from minipar.precision import MasterOptimizer
from minipar.split import split_of
from minipar.train import Engine, TrainConfig


def export(folder: str, path: str) -> int:
    """Write the weights of the latest checkpoint in `folder` to a file; how many parameters it has. Raises
    `ValueError`, one line, where there is no checkpoint or no place."""
    saved = checkpoint.find(folder)
    if os.path.realpath(saved.path) in (os.path.realpath(path), os.path.dirname(os.path.realpath(path))):
        raise ValueError(f"{path!r} lies in the checkpoint that it is made of: name a file elsewhere")
    checkpoint.check_whole(saved)
    written: list[tuple[int, bytes]] = launch.run(_whole, plan(), saved, backend="gloo", timeout=None)
    number, data = written[0]
    write_whole(path, data)
    return number


def _whole(mesh: Mesh, saved: Saved) -> tuple[int, bytes]:
    from safetensors.torch import save

    engine = Engine(mesh, TrainConfig(model=GPTConfig(**saved.model), global_batch=1, micro_batches=1))
    checkpoint.load(engine, saved)
    weights = {name: weight.detach().clone() for name, weight in engine.parameters().items()}
    facts = {"format": "pt", "model": json.dumps(saved.model), "step": str(saved.step)}
    return sum(weight.numel() for weight in weights.values()), save(weights, metadata=facts)


def check(path: str, model: GPTConfig) -> None:
    """Raise `ValueError`, naming every difference, unless the file holds the weights of this model."""
    wanted = {**asdict(model), "kv_heads": model.key_value_heads, "dropout": None}  # that may be another
    with torch.device("meta"):
        ours = {name: tuple(weight.shape) for name, weight in GPT(model).named_parameters()}
    with _opened(path) as file:
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 -- no mapping
        told = _model_of(file.metadata())
    different = [f"{name} {value} there, {wanted[name]} here" for name, value in told.items() if wanted[name] != value]
    different += [f"no {name}" for name in ours if name not in theirs]
    different += [f"{name} is {shape}" for name, shape in theirs.items() if name in ours and ours[name] != shape]
    different += [f"{name} is not ours" for name in theirs if name not in ours]
    if different:
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise ValueError(
            f"{path!r} holds other weights than this model's ({'; '.join(different[:3])}{more}): choose the sizes of "
            "the model that minipar export has written, or another file"
        )


def _model_of(facts: dict[str, str] | None) -> dict[str, Any]:
    """What the file says of the model whose weights it has, as far as it is known here."""
    try:
        model = GPTConfig(**json.loads((facts or {})["model"]))
    except (KeyError, TypeError, ValueError):
        return {}
    return {**asdict(model), "kv_heads": model.key_value_heads, "dropout": None}


def read_into(engine: Engine, path: str) -> None:
    """Begin with the weights of the file; every rank calls it."""
    names = canonical_names(engine)
    with _opened(path) as file:
        for kept in engine.replicas.kept(engine.optimizer):
            whole, split = file.get_tensor(names[id(kept.parameter)]), split_of(kept.parameter)
            piece = split.take(whole) if split else whole
            place = kept.values["weight"]
            place.copy_(piece.reshape(-1)[kept.start : kept.start + place.numel()])
    if isinstance(engine.optimizer, MasterOptimizer):
        engine.optimizer.write_down()
    engine.replicas.loaded()


def _opened(path: str) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ValueError(f"cannot read weights from {path!r} ({why}): name a file of safetensors") from None
