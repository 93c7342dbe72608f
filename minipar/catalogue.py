"""What can be bought and what has been trained: GPUs, links and models by name, with the figures of their makers.

Idea    A plan needs a handful of numbers of a machine: how fast it multiplies, how much it holds, how fast it reads
        that, and what joins it to the next one. They are facts, so they stand here, each with its source, and nowhere
        else. Peaks are dense (datasheets also print twice as much, for sparse matrices) and for 16-bit values summed
        in 32 bits. Bandwidths of links are per GPU and direction: "900 GB/s NVLink" counts both.
Source  GPUs: NVIDIA's datasheets of A100, H100, H200, HGX B200; whitepapers of GA102, Ada and RTX Blackwell. A GPU
        sold with 80 GB has 80 GiB less what its own software takes; `memory_bytes` is the smaller, round 80e9.
        Latencies: the step of a ring in NCCL's own model of its times (protocol Simple, src/graph/tuning.cc).
        Models: the papers and model cards that `source` names.
Read    `quantities.py` for numbers in place of names; `architecture.py` for what a model's sizes mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

from minipar import quantities
from minipar.architecture import Architecture


@dataclass(frozen=True)
class Link:
    """What joins two GPUs: `bandwidth` in bytes a second, per GPU and direction; `latency` in seconds. (`link.Link` is
    another: a slow one, for real messages on one machine.)"""

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Gpu:
    """`peak_flops` dense, with 16-bit values, in FLOP/s; `memory_bytes`, and how many of them it reads a second;
    `inside`: what joins the GPUs of a node; `outside`: what each has to other nodes, in the usual machine."""

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float
    inside: str
    outside: str
    source: str


NVLINK, PCIE, NETWORK = 3.4e-6, 5.7e-6, 14e-6  # seconds of latency

LINKS = {
    link.name: link
    for link in (
        Link("nvlink2", 150e9, NVLINK),  # V100: 300 GB/s in both directions
        Link("nvlink3", 300e9, NVLINK),  # A100
        Link("nvlink4", 450e9, NVLINK),  # H100, H200
        Link("nvlink5", 900e9, NVLINK),  # B200
        Link("pcie3", 15.8e9, PCIE),  # 16 lanes
        Link("pcie4", 31.5e9, PCIE),
        Link("pcie5", 63e9, PCIE),
        Link("edr", 12.5e9, NETWORK),  # InfiniBand: 100 Gb/s a port
        Link("hdr", 25e9, NETWORK),  # 200
        Link("ndr", 50e9, NETWORK),  # 400
        Link("xdr", 100e9, NETWORK),  # 800
        Link("1gbe", 0.125e9, 50e-6),  # Ethernet, by TCP: the latency of a message between two machines of a rack
        Link("10gbe", 1.25e9, 50e-6),
        Link("25gbe", 3.125e9, 50e-6),
        Link("100gbe", 12.5e9, 50e-6),
    )
}

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("v100", 125e12, 32e9, 0.9e12, "nvlink2", "edr", "Tesla V100 datasheet (SXM2, 32 GB; float16)"),
        Gpu("a100-40gb", 312e12, 40e9, 1.555e12, "nvlink3", "hdr", "A100 datasheet (SXM)"),
        Gpu("a100", 312e12, 80e9, 2.039e12, "nvlink3", "hdr", "A100 datasheet (SXM, 80 GB)"),
        Gpu("h100", 989.4e12, 80e9, 3.35e12, "nvlink4", "ndr", "H100 datasheet (SXM)"),
        Gpu("h200", 989.4e12, 141e9, 4.8e12, "nvlink4", "ndr", "H200 datasheet (SXM)"),
        Gpu("b200", 2250e12, 192e9, 8e12, "nvlink5", "ndr", "HGX B200 datasheet (1000 W)"),
        Gpu("rtx3090", 71e12, 24e9, 0.936e12, "pcie4", "10gbe", "GA102 whitepaper"),
        Gpu("rtx4090", 165.2e12, 24e9, 1.008e12, "pcie4", "10gbe", "Ada GPU architecture whitepaper"),
        Gpu("rtx5090", 209.5e12, 32e9, 1.792e12, "pcie5", "10gbe", "RTX Blackwell whitepaper"),
    )
}

_LLAMA = {"biases": False, "gated": True, "tied": False, "rms": True}

MODELS = {
    model.name: model
    for model in (
        Architecture("gpt2", 12, 768, 12, 50257, positions=1024),
        Architecture("gpt2-xl", 48, 1600, 25, 50257, positions=1024),
        Architecture("gpt3-175b", 96, 12288, 96, 50257, positions=2048),
        Architecture("megatron-1.7b", 24, 2304, 24, 51200, positions=2048),
        Architecture("megatron-3.6b", 30, 3072, 32, 51200, positions=2048),
        Architecture("megatron-7.5b", 36, 4096, 32, 51200, positions=2048),
        Architecture("megatron-18b", 40, 6144, 48, 51200, positions=2048),
        Architecture("megatron-39b", 48, 8192, 64, 51200, positions=2048),
        Architecture("megatron-76b", 60, 10240, 80, 51200, positions=2048),
        Architecture("megatron-146b", 80, 12288, 96, 51200, positions=2048),
        Architecture("megatron-310b", 96, 16384, 128, 51200, positions=2048),
        Architecture("megatron-530b", 105, 20480, 128, 51200, positions=2048),
        Architecture("megatron-1t", 128, 25600, 160, 51200, positions=2048),
        Architecture("bloom-176b", 70, 14336, 112, 250880, more=2 * 14336),  # ALiBi; a LayerNorm after the embedding
        Architecture("llama2-7b", 32, 4096, 32, 32000, inner=11008, **_LLAMA),
        Architecture("llama2-13b", 40, 5120, 40, 32000, inner=13824, **_LLAMA),
        Architecture("llama2-70b", 80, 8192, 64, 32000, kv_heads=8, inner=28672, **_LLAMA),
        Architecture("llama3-8b", 32, 4096, 32, 128256, kv_heads=8, inner=14336, **_LLAMA),
        Architecture("llama3-70b", 80, 8192, 64, 128256, kv_heads=8, inner=28672, **_LLAMA),
        Architecture("llama3-405b", 126, 16384, 128, 128256, kv_heads=8, inner=53248, **_LLAMA),
    )
}

Kept = TypeVar("Kept")


def gpu(name: str) -> Gpu:
    """A GPU by its name, in capitals or not. Raises `ValueError`, one line, for one that is not in the catalogue."""
    return _find("GPU", name, GPUS)


def model(name: str) -> Architecture:
    """A model by its name. Raises `ValueError`, one line, for one that is not in the catalogue."""
    return _find("model", name, MODELS)


def link(text: str) -> Link:
    """A link by its name (ndr, nvlink4, 10gbe) or by its rate (400Gb/s). Raises `ValueError`, one line, else."""
    name = text.strip().lower().replace("-", "").replace(" ", "")
    if name in LINKS:
        return LINKS[name]
    try:
        found = Link(text.strip(), quantities.rate(text), NETWORK)
        if found.bandwidth >= 1e6:
            return found
        raise ValueError
    except ValueError:
        raise ValueError(
            f"link {text!r} is no name and no rate: choose from {', '.join(LINKS)}, or write 400Gb/s"
        ) from None


def _find(what: str, name: str, among: dict[str, Kept]) -> Kept:
    asked = name.strip().lower().replace("_", "-").replace(" ", "")
    if asked in among:
        return among[asked]
    close = get_close_matches(asked, among, 1)
    meant = f"did you mean {close[0]}? " if close else ""
    raise ValueError(f"unknown {what} {name!r}: {meant}choose from {', '.join(among)}")
