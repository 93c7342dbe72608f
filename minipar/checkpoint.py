"""Checkpoints: what a run needs to go on, on the same ranks or on quite different ones.

Idea    Each rank saves the runs of elements that it keeps, under names that say what they are: parameter, which of
        the tensor-parallel pieces, from which element on. So a checkpoint knows no topology but in its names. To
        load, a rank finds the runs of the parameters that it needs, puts pieces and then whole parameters together,
        and takes its own pieces and runs out of them. Data needs no state beside the number of the step, and neither
        does dropout: both are functions of it.

            saved by dp 2 x tp 2, ZeRO 1         blocks.0.mlp.up.weight|tp 0/2|0      |tp 0/2|4096   |tp 1/2|0 ...
            needed by dp 4, ZeRO 3               runs -> pieces -> whole -> this rank's quarter

Cost    Weights and optimizer states once over all ranks, 12 bytes a parameter in fp32. Written beside the last good
        checkpoint and renamed when complete, so that a save that is killed leaves nothing that could be loaded. The
        run stands still meanwhile, or (`aside`) only while its state is copied.
Source  Storage is torch.distributed.checkpoint's: each rank writes a file, replicas are written once.
Read    `zero.py` and `split.py` before: which runs and pieces there are.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read_runs
from torch.distributed.checkpoint.state_dict_saver import save as write_runs

from minipar import faults
from minipar.comm import twin
from minipar.mesh import Mesh
from minipar.precision import MasterOptimizer, plain
from minipar.split import split_of
from minipar.train import Engine, TrainConfig

FORMAT = 1
FACTS = "minipar.json"  # written last: a folder with it is complete


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: its folder, after how many steps it was made, the model in it, the checksum of each of its
    files, how many of the steps changed the weights, and the loss scale of float16 with the good steps since its last
    change."""

    path: Path
    step: int
    model: dict[str, Any]
    files: dict[str, int] = field(default_factory=dict)
    updates: int = 0
    loss_scale: tuple[float, int] | None = None
    data: str | None = None


def find(folder: str | Path) -> Saved:
    """The latest complete checkpoint in a folder (or the checkpoint that the folder is).

    Raises `ValueError`, one line, when there is none, naming one that was left half-written.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"no checkpoint: {folder} is not a folder; name one that --save has written")
    candidates = [folder, *reversed(_steps(folder))]
    for candidate in candidates:
        if (candidate / FACTS).is_file():
            return _read_facts(candidate)
    partial = [path.name for path in folder.glob(".partial-*")]
    left = f" (half-written, not usable: {', '.join(sorted(partial))})" if partial else ""
    raise ValueError(f"no checkpoint in {folder}{left}: name a folder that --save has written")


def find_whole(folder: str | Path, *, before: int | None = None) -> tuple[Saved | None, list[str]]:
    """The latest checkpoint that is whole, of fewer than `before` steps; and what is wrong with later ones."""
    faults_found: list[str] = []
    for candidate in reversed(_steps(Path(folder))):
        if before is not None and int(candidate.name[5:]) >= before:
            continue
        try:
            saved = _read_facts(candidate)
            check_whole(saved)
            return saved, faults_found
        except ValueError as error:
            faults_found.append(str(error).partition(": remove it")[0])
    return None, faults_found


def _steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, complete or not, in their order; whatever else is there is somebody else's."""
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))


def _read_facts(path: Path) -> Saved:
    try:
        facts = json.loads((path / FACTS).read_text())
        if not int(facts["step"]) > 0:
            raise ValueError(f"step {facts['step']}")
        updates, files, scale = facts.get("updates", facts["step"]), dict(facts.get("files", {})), facts["loss_scale"]
        scale = None if scale is None else (float(scale[0]), int(scale[1]))
        return Saved(path, int(facts["step"]), dict(facts["model"]), files, int(updates), scale, facts.get("data"))
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"checkpoint {path} is damaged ({error}): remove it to use the one before") from None


def check(saved: Saved, config: TrainConfig) -> None:
    """Raise `ValueError`, naming every difference, unless the checkpoint holds this model."""
    ours = asdict(config.model)
    theirs = saved.model
    different = [f"{n} {theirs.get(n)} there, {ours[n]} here" for n in ours if theirs.get(n) != ours[n]]
    if different:
        raise ValueError(f"checkpoint {saved.path} holds another model: {'; '.join(different)}")


def check_whole(saved: Saved) -> None:
    """Raise `ValueError`, one line, if a file of the checkpoint is missing or is not what was saved."""
    for name, expected in saved.files.items():
        try:
            found = _checksum(saved.path / name)
        except OSError as error:
            raise _damaged(saved, f"{name}: {error.strerror}") from None
        if found != expected:
            raise _damaged(saved, f"{name} is not as it was saved")


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def _damaged(saved: Saved, reason: str) -> faults.Refusal:
    return faults.Refusal(f"checkpoint {saved.path} is damaged ({reason}): remove it to use the one before")


def check_free(folder: str | Path, begin: int) -> None:
    """Raise `ValueError` if `folder` has checkpoints of later steps than `begin`, from which this run goes on: they
    are another run's, and would be mixed with this one's, or taken for them."""
    steps = [int(path.name[5:]) for path in _steps(Path(folder))]
    if max(steps, default=0) > begin:
        raise ValueError(
            f"{folder} holds checkpoints of another run, up to step {max(steps)}: choose another folder for --save, or "
            f"go on from there with --resume {folder}"
        )


def check_place(folder: str | Path) -> None:
    """Raise `ValueError`, one line, if checkpoints could not be written into `folder`, which is made if need be."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = "it is a file" if os.path.isfile(folder) else error.strerror
        raise ValueError(f"cannot save into {folder} ({why}): choose another folder") from None


# Saving.


class Saver:
    """Writes a run's checkpoints into `folder`, where the last `keep` stay; every rank has one.

    `texts` are files to lie beside the weights, such as the tokenizer; `data` is where the text came from. `aside`:
    `save` only copies what is to be written (12 bytes a parameter, over all ranks), and a thread writes it while the
    run goes on; it has messages of its own, in a group of its own, which the copy of the run's does not see.
    """

    def __init__(
        self,
        mesh: Mesh,
        folder: str | Path,
        *,
        keep: int = 2,
        texts: Mapping[str, str] | None = None,
        data: str | None = None,
        aside: bool = False,
    ) -> None:
        self.folder, self._world, self._keep, self._texts = Path(folder), mesh.world, keep, texts or {}
        self._data = data
        self._thread = ThreadPoolExecutor(1, "save") if aside else None
        self._group = twin(mesh.world) if aside else mesh.world
        self._under_way: Future[None] | None = None

    def save(self, engine: Engine) -> None:
        """Write a checkpoint of this step, or begin to; every rank calls it."""
        self.finish()
        facts = {"format": FORMAT, "step": engine.step_number, "model": asdict(engine.config.model)}
        facts |= {"data": self._data, "updates": engine.updates}
        facts |= {"loss_scale": None if engine.scale.fixed else [engine.scale.value, engine.scale.good]}
        runs = _named_runs(engine)
        if self._thread is None:
            with self._told():
                self._write(runs, facts)
        else:
            copies = {name: run.detach().to("cpu", copy=True) for name, run in runs.items()}
            self._under_way = self._thread.submit(self._write, copies, facts)

    def finish(self) -> None:
        """Wait for the save that is under way. Raises `Refusal`, one line, if it has failed."""
        if self._under_way is not None:
            with self._told():
                self._under_way.result()
            self._under_way = None

    def _write(self, runs: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Every rank's runs, then what makes them a checkpoint. The folder gets its name when nothing is missing."""
        group, step = self._group, facts["step"]
        partial, final = self.folder / f".partial-{step:08d}", self.folder / f"step-{step:08d}"
        if group.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(".partial-*"):  # of a save that was killed
                shutil.rmtree(left)
        group.barrier()
        try:
            self._fill(partial, runs, facts)
        except BaseException:
            if group.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if group.rank == 0:
            if final.exists():
                shutil.rmtree(final)
            os.rename(partial, final)
            for old in _steps(self.folder)[: -self._keep]:
                shutil.rmtree(old)
        group.barrier()

    def _fill(self, partial: Path, runs: dict[str, Tensor], facts: dict[str, Any]) -> None:
        write_runs(runs, checkpoint_id=partial, process_group=self._group.handle)
        if self._group.rank == 0:
            for name, text in self._texts.items():
                _write_durably(partial / name, text)
            files = {path.name: _checksum(path) for path in sorted(partial.iterdir())}
            _write_durably(partial / FACTS, json.dumps({**facts, "files": files}))

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (CheckpointException, OSError, RuntimeError) as error:
            raise faults.Refusal(
                f"cannot save into {self.folder} ({_reason(error)}): make room there, or choose another folder; the "
                "checkpoints before are whole"
            ) from None


def _reason(error: BaseException) -> str:
    """What went wrong, in a line: torch's own exception only lists what the ranks have raised."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def canonical_names(engine: Engine) -> dict[int, str]:
    """A name for each parameter of this rank, by its id; both copies of a tied embedding have the same."""
    tied = {id(copy) for copy in engine.tied}
    return {id(p): "embedding.word.weight" if id(p) in tied else name for name, p in engine.parameters().items()}


def _named_runs(engine: Engine) -> dict[str, Tensor]:
    """All runs that this rank keeps, by their names in the checkpoint."""
    names, runs = canonical_names(engine), dict[str, Tensor]()
    for kept in engine.replicas.kept(engine.optimizer):
        split = split_of(kept.parameter)
        piece = f"tp {split.rank}/{split.size}" if split else "whole"
        for value, tensor in kept.values.items():
            runs["|".join((names[id(kept.parameter)], value, piece, str(kept.start)))] = tensor
    return runs


# Loading.


@dataclass(frozen=True)
class Run:
    """A saved run: its key, which tensor-parallel piece of how many it lies in, and where."""

    key: str
    tp_rank: int
    tp_size: int
    start: int
    values: int
    dtype: torch.dtype


def load(engine: Engine, saved: Saved) -> None:
    """Bring this rank's weights and optimizer states to where they were; every rank calls it."""
    try:
        reader = FileSystemReader(saved.path)
        available = reader.read_metadata().state_dict_metadata
        _prime(engine.optimizer)
        runs = _saved_runs(available)
        names = canonical_names(engine)
        for kept in engine.replicas.kept(engine.optimizer):
            for value, place in kept.values.items():
                if saved.updates == 0 and value != "weight":
                    continue  # no step had been taken, so the optimizer had no states, and has none now
                piece = _piece(runs, names[id(kept.parameter)], value, kept.parameter, reader)
                place.copy_(piece.view(-1)[kept.start : kept.start + place.numel()])
    except (Exception, CheckpointException) as error:  # whatever the bytes of a damaged file may lead to
        raise _damaged(saved, _reason(error)) from None
    if isinstance(engine.optimizer, MasterOptimizer):
        engine.optimizer.write_down()
    engine.replicas.loaded()
    engine.step_number, engine.updates = saved.step, saved.updates
    _set_steps(engine.optimizer, saved.updates)
    if not engine.scale.fixed and saved.loss_scale is not None:  # it was float16 there, too
        engine.scale.value, engine.scale.good = saved.loss_scale


def _saved_runs(available: dict[str, Any]) -> dict[tuple[str, str], list[Run]]:
    runs: dict[tuple[str, str], list[Run]] = {}
    for key, facts in available.items():
        name, value, piece, start = key.split("|")
        rank, size = map(int, piece.removeprefix("tp ").split("/")) if piece != "whole" else (0, 1)
        runs.setdefault((name, value), []).append(
            Run(key, rank, size, int(start), facts.size.numel(), facts.properties.dtype)
        )
    return runs


def _piece(runs: dict[Any, list[Run]], name: str, value: str, parameter: Tensor, reader: Any) -> Tensor:
    """This rank's piece of one value of a parameter, from all of its runs."""
    found = runs[name, value]
    split, size = split_of(parameter), found[0].tp_size
    same = split is not None and split.size == size
    wanted = [run for run in found if split is None or not same or run.tp_rank == split.rank]
    read = {run.key: torch.empty(run.values, dtype=run.dtype) for run in wanted}
    with warnings.catch_warnings():  # torch tells each rank that it reads alone, which is what is wanted
        warnings.filterwarnings("ignore", message=".*single process")
        read_runs(read, storage_reader=reader, no_dist=True)
    pieces = [
        torch.cat([read[run.key] for run in sorted(wanted, key=lambda run: run.start) if run.tp_rank == rank])
        for rank in sorted({run.tp_rank for run in wanted})
    ]
    if split is None or same:
        return pieces[0]
    saved_as = replace(split, size=size)
    shape = list(split.whole_shape(parameter.shape))
    shape[split.dim] = sum(saved_as.shares)
    whole = saved_as.join([piece.view(shape) for piece in pieces])
    return split.take(whole)


def _prime(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its states, by a step that changes no weight."""
    optimizer = plain(optimizer)
    before = [dict(options) for options in optimizer.param_groups]
    for options in optimizer.param_groups:
        options["lr"] = 0.0
        for parameter in options["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for options, old in zip(optimizer.param_groups, before, strict=True):
        options["lr"] = old["lr"]


def _set_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    for state in plain(optimizer).state.values():
        if "step" in state:
            state["step"] = torch.full_like(torch.as_tensor(state["step"], dtype=torch.float32), steps)
