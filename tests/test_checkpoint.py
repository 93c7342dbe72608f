"""Checkpoints: a run goes on where it was saved, on any topology; what is damaged or in the way is told in a line."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import minipar
from minipar import checkpoint, cli
from minipar.batches import RandomBatches
from minipar.mesh import Mesh, plan
from minipar.model import GPTConfig
from minipar.train import Engine, TrainConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = "--layers 4 --hidden 16 --heads 4 --vocab 301 --sequence 16 --global-batch 8 --micro-batches 2 --lr 0.01"
SMALL = [*SIZES.split(), "--data", argparse.__file__, "--clip", "0.5"]
SAVED, STEPS = 3, 6


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One cache for all tests here, and not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIPAR_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


def train(*options: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["train", *SMALL, *options])
    return int(end.value.code or 0)


def losses(folder: Path, *options: str) -> tuple[list[float], list[float]]:
    file = folder / "r.json"
    assert train("--report", str(file), *options) == 0
    found = json.loads(file.read_text())
    return found["losses"], found["grad_norms"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps on dp 2 x tp 2 that has saved each."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    assert train("--dp", "2", "--tp", "2", "--steps", str(SAVED), "--save", str(folder), "--save-every", "1") == 0
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """The same, to be spoiled."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


# Going on.


def test_the_last_two_checkpoints_stay(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000002", "step-00000003"]
    assert checkpoint.find(saved).step == SAVED
    assert checkpoint.find(saved / "step-00000002").step == 2


def test_a_resumed_run_is_the_uninterrupted_run_to_the_bit(saved: Path, tmp_path: Path) -> None:
    shape = ["--dp", "2", "--tp", "2", "--steps", str(STEPS)]
    whole = losses(tmp_path, *shape)
    resumed = losses(tmp_path, *shape, "--resume", str(saved))
    assert [part[SAVED:] for part in whole] == list(resumed)


@pytest.mark.parametrize(
    "shape",
    [
        "--dp 1",
        "--dp 4 --zero 3",
        "--dp 2 --zero 1",
        "--tp 4 --sequence-parallel",
        "--pp 4 --schedule zb-h1",
        "--pp 2 --schedule interleaved --chunks 2 --micro-batches 4",
        "--dp 2 --pp 2 --tp 2 --zero 2",
    ],
)
def test_a_run_goes_on_with_any_other_topology(shape: str, saved: Path, tmp_path: Path) -> None:
    whole = losses(tmp_path, "--dp", "1", "--steps", str(STEPS))
    resumed = losses(tmp_path, *shape.split(), "--steps", str(STEPS), "--resume", str(saved))
    for part, found in zip(whole, resumed, strict=True):
        assert found == pytest.approx(part[SAVED:], rel=1e-4)


def test_tied_embeddings_and_every_stage_of_zero_are_saved_and_loaded(tmp_path: Path) -> None:
    whole = losses(tmp_path, "--dp", "1", "--tied", "--steps", "4")
    for number, (first, second) in enumerate([("--pp 2 --dp 2 --zero 2", "--tp 2"), ("--dp 2 --zero 3", "--pp 2")]):
        folder = str(tmp_path / str(number))
        assert train(*first.split(), "--tied", "--steps", "2", "--save", folder) == 0
        resumed = losses(tmp_path, *second.split(), "--tied", "--steps", "4", "--resume", folder)
        for part, found in zip(whole, resumed, strict=True):
            assert found == pytest.approx(part[2:], rel=1e-4)


def test_resuming_says_nothing_on_stderr(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train("--tp", "2", "--zero", "3", "--steps", str(STEPS), "--resume", str(saved)) == 0
    assert capfd.readouterr().err == ""


def test_a_half_written_checkpoint_is_left_alone(copy: Path) -> None:
    os.rename(copy / "step-00000003", copy / ".partial-00000003")
    assert checkpoint.find(copy).step == 2


# What is in the way.


def refused(capfd: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line with which the run is refused."""
    capfd.readouterr()
    assert train(*options) == 2
    error = capfd.readouterr().err
    assert len(error.strip().splitlines()) == 1, error
    return error


def test_another_runs_checkpoints_are_neither_replaced_nor_mixed_up(
    copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    told = refused(capfd, "--dp", "2", "--steps", "2", "--save", str(copy))
    assert "holds checkpoints of another run, up to step 3" in told and "--resume" in told
    earlier = str(copy / "step-00000002")
    refused(capfd, "--dp", "2", "--steps", "5", "--resume", earlier, "--save", str(copy))
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before
    assert train("--dp", "2", "--steps", "5", "--resume", str(copy), "--save", str(copy)) == 0
    assert sorted(path.name for path in copy.iterdir()) == ["step-00000003", "step-00000005"]


def test_a_folder_that_is_a_file_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert "it is a file" in refused(capfd, "--dp", "1", "--steps", "1", "--save", str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("aside", [(), ("--save-aside",)])
def test_a_disk_that_is_full_is_told_in_a_line_and_what_was_saved_stays(
    aside: tuple[str, ...], copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files stands in for the disk's end: writing fails in the middle."""
    from minipar import job

    real = job._train_and_print
    job._train_and_print = with_small_files  # type: ignore[assignment]
    try:
        told = refused(capfd, "--dp", "2", "--steps", "5", "--resume", str(copy), "--save", str(copy), *aside)
    finally:
        job._train_and_print = real
    assert f"cannot save into {copy} (" in told and "the checkpoints before are whole" in told
    assert checkpoint.find(copy).step == SAVED
    assert train("--dp", "2", "--steps", "5", "--resume", str(copy), "--save", str(copy)) == 0


def with_small_files(mesh: Any, job_: Any, started: float) -> Any:
    """A rank that can write no more than 20 kB into a file once it saves."""
    from minipar import job

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    write = checkpoint.write_runs

    def lower(*arguments: Any, **options: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        return write(*arguments, **options)

    checkpoint.write_runs = lower  # type: ignore[assignment]
    return job._train_and_tell(mesh, job_, started, lambda event: None)


# While training goes on.


def step(engine: Engine, mesh: Mesh, number: int) -> None:
    rows = RandomBatches(vocab=11, sequence=6, global_batch=4)
    engine.step(rows.rows(number, 2 * mesh.dp.rank, 2 * mesh.dp.rank + 2))


def train_while_saving(mesh: Mesh, config: TrainConfig, folder: Path, zero: int) -> tuple[list[str], bool, int]:
    """A save that cannot end before two more steps have been taken: what lies there by then; whether what is saved is
    the state of when it began; how many messages of the writing were counted."""
    engine, gate, write = Engine(mesh, replace(config, zero=zero)), threading.Event(), checkpoint.write_runs
    saver = checkpoint.Saver(mesh, folder, aside=True)
    step(engine, mesh, 0)
    then = [p.detach().clone() for p in engine.parameters().values()]
    checkpoint.write_runs = lambda *a, **o: gate.wait() and write(*a, **o)  # type: ignore[assignment]
    mesh.world.wire.messages.clear()
    saver.save(engine)
    counted = len(mesh.world.wire.messages)
    step(engine, mesh, 1)
    step(engine, mesh, 2)
    before = [path.name for path in folder.glob("step-*")]
    gate.set()
    saver.finish()
    mesh.world.barrier()
    fresh = Engine(mesh, config)
    checkpoint.load(fresh, checkpoint.find(folder))
    loaded = list(fresh.parameters().values())
    same = all(torch.equal(a, b) for a, b in zip(loaded, then, strict=True)) if not zero else fresh.step_number == 1
    return before, same, counted


@pytest.mark.parametrize("zero", [0, 2])
def test_a_save_aside_holds_nobody_up_and_keeps_the_state_of_when_it_began(tmp_path: Path, zero: int) -> None:
    config = TrainConfig(model=GPTConfig(layers=2, hidden=8, heads=2, vocab=11, sequence=6), global_batch=4, lr=0.1)
    for before, same, counted in minipar.run(train_while_saving, plan(dp=2), config, tmp_path / "run", zero):
        assert before == [] and same and counted == 0


def test_a_run_goes_on_from_checkpoints_written_aside_to_the_bit(tmp_path: Path) -> None:
    shape = ["--dp", "2", "--tp", "2", "--zero", "1", "--steps", str(STEPS)]
    aside = ["--save", str(tmp_path / "run"), "--save-every", "1", "--save-aside", "--keep", "4"]
    whole = losses(tmp_path, *shape, *aside)
    assert len(list((tmp_path / "run").glob("step-*"))) == 4
    resumed = losses(tmp_path, *shape, "--resume", str(tmp_path / "run" / "step-00000003"))
    assert [part[SAVED:] for part in whole] == list(resumed)


# Damage.


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def overwrite(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a file is gone": ("__1_0.distcp", Path.unlink),
    "a file is short": ("__1_0.distcp", truncate),
    "a bit has turned": ("__0_0.distcp", overwrite),
    "the table of contents is short": (".metadata", truncate),
    "the table of contents is something else": (".metadata", lambda path: path.write_bytes(b"garbage\n")),
    "the facts are no JSON": (checkpoint.FACTS, lambda path: path.write_text("{")),
    "the facts are something else": (checkpoint.FACTS, lambda path: path.write_text("[1]")),
    "the step is none": (checkpoint.FACTS, lambda path: path.write_text('{"step": -4, "model": {}}')),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_in_a_line_before_any_rank_starts(
    damage: str, copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, spoil = DAMAGES[damage]
    spoil(copy / "step-00000003" / name)
    told = refused(capfd, "--dp", "2", "--steps", "5", "--resume", str(copy))
    assert "step-00000003 is damaged (" in told and "remove it to use the one before" in told
    shutil.rmtree(copy / "step-00000003")
    assert train("--dp", "2", "--steps", "5", "--resume", str(copy)) == 0


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_damage_that_only_the_ranks_see_is_told_in_a_line_too(
    name: str, copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in a checkpoint without checksums."""
    facts = copy / "step-00000003" / checkpoint.FACTS
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "files": {}}))
    truncate(facts.parent / name)
    assert "is damaged (" in refused(capfd, "--dp", "2", "--steps", "5", "--resume", str(copy))
