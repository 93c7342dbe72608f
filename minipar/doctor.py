"""What this machine can run: not looked up, but tried.

Idea    Each check does what the course will do: start ranks, let them reduce a tensor, train in 3D, write to the cache.
        A row says what was found, whether it will do, and if not, what to do about it. Rows with a dash are good to
        know: without a GPU or notebooks the main job runs all the same.
Read    `launch.py`, which starts the ranks, and `job.py`, which trains on them.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter

import psutil  # type: ignore[import-untyped]
import torch
from rich.console import Console
from rich.table import Table

from minipar import comm, job, launch, ledger, server
from minipar.cache import cache_folder
from minipar.comm import Group
from minipar.mesh import plan
from minipar.model import GPTConfig
from minipar.train import TrainConfig

MESSAGE_BYTES = 16 << 20  # for the bandwidth
SECONDS = 60.0  # the most that ranks may take to start


@dataclass(frozen=True)
class Finding:
    """One row: `good` is None where it is only good to know."""

    what: str
    found: str
    good: bool | None
    advice: str = ""


def command() -> int:
    """`minipar doctor`: print the table; 0 if the main job can run here, else 1."""
    width = min(Console().width, 80)
    console = Console(highlight=False, width=width)
    findings = []
    with console.status("checking ...") if console.is_interactive else nullcontext():
        for check in CHECKS:
            findings += tried(check)
    table = Table(box=None, pad_edge=False)
    for heading in ("check", "found", "", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        verdict = {True: "ok", False: "no", None: "-"}[finding.good]
        table.add_row(finding.what, finding.found, verdict, finding.advice)
    console.print(table)
    fit = all(finding.good is not False for finding in findings)
    console.print("\nThe main job can run: minipar train" if fit else "\nThe main job cannot run: mend what says no.")
    return 0 if fit else 1


def tried(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The findings of a check; one that fails is a finding, too."""
    found: list[Finding] = []
    try:
        found += check()
    except (RuntimeError, OSError, ValueError) as error:
        name = check.__name__.replace("_", " ")
        found.append(Finding(name, "failed", False, str(error).partition("\n")[0]))
    return found


def software() -> Iterator[Finding]:
    """Python and torch."""
    yield Finding("Python", platform.python_version(), True)
    yield Finding("torch", torch.__version__, True)


def hardware() -> Iterator[Finding]:
    """Cores, and memory for the ranks of the main job."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    few = f"8 ranks share {cores}: everything runs, more slowly" if cores < 8 else ""
    yield Finding("cores", str(cores), True, few)
    memory, need = psutil.virtual_memory(), 8 * launch.RANK_BYTES
    free = memory.available
    advice = "" if free > need else "close other programs, or train with fewer ranks"
    yield Finding("memory", f"{free / 1e9:.1f} GB free of {memory.total / 1e9:.1f}", free > need, advice)
    layers, hidden, parameters = largest_model(free)
    yield Finding(
        "largest model", f"{parameters / 1e6:,.0f} million parameters", None,
        f"on 8 ranks, about: --layers {layers} --hidden {hidden} --heads {hidden // 64}",
    )  # fmt: skip


def largest_model(free: float) -> tuple[int, int, int]:
    """Layers, width and parameters of about the largest GPT whose states fit into `free` bytes on dp 2 x pp 2 x tp 2,
    with a third left for activations: by the ledger, in fp32, 64 times as wide as it has layers."""
    best = (2, 128, 0)
    for layers in range(2, 400, 2):
        hidden = 64 * layers
        parameters = ledger.parameters(
            layers=layers, hidden=hidden, heads=layers, vocab=1024, sequence=128, tied=False
        )
        state = ledger.model_state_bytes(parameters, dp=2, tp=2, pp=2, precision="fp32")
        if 8 * (launch.RANK_BYTES + state.total) > free * 2 / 3:
            break
        best = (layers, hidden, parameters)
    return best


def ranks() -> Iterator[Finding]:
    """How ranks start, and how fast they talk."""
    way = "forkserver" if server.FORKS else "spawn"
    yield Finding("ranks start by", way, True, "" if server.FORKS else "each start takes seconds instead of 0.1 s")
    launch.run(_reduce_one, 2, backend="gloo", timeout=SECONDS)  # the first ranks wait for the server
    for number in (2, 8):
        start = perf_counter()
        total = launch.run(_reduce_one, number, backend="gloo", timeout=SECONDS)
        took = perf_counter() - start
        right = total == [float(number)] * number
        yield Finding(f"{number} gloo ranks", f"started, talked, ended in {took:.2f} s", right)
    seconds = max(launch.run(_time_all_reduce, 2, backend="gloo", timeout=SECONDS))
    yield Finding("all_reduce", f"{MESSAGE_BYTES / seconds / 1e9:.2f} GB/s, 2 ranks, 16 MiB", None)


def _reduce_one(group: Group) -> float:
    return float(group.all_reduce(torch.ones(())))


def _time_all_reduce(group: Group) -> float:
    """Seconds of one all_reduce, the best of five."""
    tensor, best = torch.ones(MESSAGE_BYTES // 4), float("inf")
    for _ in range(5):
        group.barrier()
        start = perf_counter()
        group.all_reduce(tensor, "mean")
        best = min(best, perf_counter() - start)
    return best


def main_job() -> Iterator[Finding]:
    """Two steps of a small model in 3D, on minipar's own source."""
    model = GPTConfig(layers=2, hidden=16, heads=2, vocab=260, sequence=16)
    config = TrainConfig(model=model, global_batch=8, micro_batches=2, steps=2)
    mesh = plan(dp=2, pp=2, tp=2)
    start = perf_counter()
    outcome = job.run(job.Job(config, mesh, data=os.path.dirname(__file__)), lambda event: None)
    took = perf_counter() - start
    counted = outcome is not None and all(
        row["bytes_per_step"] == row["predicted_bytes_per_step"] for row in outcome.report["communication"]
    )
    yield Finding("3D training", f"2 steps on 8 ranks in {took:.2f} s", counted)


def gpus() -> Iterator[Finding]:
    """GPUs, and NCCL on them."""
    number = torch.cuda.device_count()
    if not number:
        yield Finding("GPUs", "none", None, "not needed: ranks use gloo on the processor")
        return
    names = ", ".join(sorted({torch.cuda.get_device_name(gpu) for gpu in range(number)}))
    yield Finding("GPUs", f"{number}: {names}", None)
    if comm.choose_backend(number) != "nccl":
        yield Finding("NCCL", "not in this torch", None, "ranks use gloo; for NCCL install torch with CUDA")
        return
    right = launch.run(_reduce_one_on_gpu, number, backend="nccl", timeout=SECONDS) == [float(number)] * number
    fits = "" if number >= 8 else f"used by up to {number} ranks; more use gloo"
    yield Finding("NCCL", f"{number} ranks talked", right, fits)


def _reduce_one_on_gpu(group: Group) -> float:
    return float(group.all_reduce(torch.ones((), device="cuda")))


def places() -> Iterator[Finding]:
    """Where prepared text is kept."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        yield Finding("cache", _short(str(folder)), True)
    except OSError as error:
        yield Finding("cache", _short(str(folder)), None, f"{error.strerror}: text is prepared anew; set MINIPAR_CACHE")


def _short(path: str) -> str:
    home = os.path.expanduser("~")
    return "~" + path[len(home) :] if path.startswith(home + os.sep) else path


def notebooks() -> Iterator[Finding]:
    """JupyterLab, for cells that run on ranks."""
    try:
        yield Finding("JupyterLab", version("jupyterlab"), True)
    except PackageNotFoundError:
        yield Finding("JupyterLab", "not installed", None, "for notebooks: pip install jupyterlab")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (software, hardware, ranks, main_job, gpus, places, notebooks)
