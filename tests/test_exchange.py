"""Whole weights in a file, out of any topology's checkpoint and into any other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from safetensors.torch import load_file, save_file

import minipar
from minipar import checkpoint, cli, exchange, metrics
from minipar.batches import RandomBatches
from minipar.mesh import Mesh, plan
from minipar.model import GPTConfig, build
from minipar.train import Engine, TrainConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MODEL = GPTConfig(layers=3, hidden=12, heads=4, kv_heads=2, vocab=11, sequence=6)
CONFIG = TrainConfig(model=MODEL, global_batch=4, micro_batches=2, lr=0.01, warmup=0)


def train_and_save(mesh: Mesh, config: TrainConfig, folder: str) -> None:
    engine = Engine(mesh, config)
    batches = RandomBatches(vocab=config.model.vocab, sequence=config.model.sequence, global_batch=config.global_batch)
    rows = config.global_batch // mesh.dp.size
    for step in range(2):
        engine.step(batches.rows(step, mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows))
    checkpoint.Saver(mesh, folder).save(engine)


def loss_from(mesh: Mesh, config: TrainConfig, path: str) -> float:
    engine = Engine(mesh, config)
    exchange.read_into(engine, path)
    batches = RandomBatches(vocab=config.model.vocab, sequence=config.model.sequence, global_batch=config.global_batch)
    rows = config.global_batch // mesh.dp.size
    return engine.step(batches.rows(7, mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows)).loss


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        (plan(), {}),
        (plan(dp=2, tp=2, pp=2), {"zero": 1}),
        (plan(dp=2), {"zero": 3}),
        (plan(tp=2, dp=2), {"sequence_parallel": True}),
        (plan(pp=3), {"precision": "bf16"}),
    ],
    ids=str,
)
def test_a_checkpoint_of_any_topology_is_one_file_of_the_models_weights(
    mesh: Mesh, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = TrainConfig(**{**vars(CONFIG), **changes})
    minipar.run(train_and_save, mesh, config, str(tmp_path / "run"))
    file = str(tmp_path / "w.safetensors")
    assert exchange.export(str(tmp_path / "run"), file) == sum(p.numel() for p in build(MODEL).parameters())
    weights = load_file(file)
    whole = build(MODEL)
    whole.load_state_dict(weights)  # strict: the same names and shapes, no others
    rows = RandomBatches(vocab=11, sequence=6, global_batch=4)[7]
    truth = (whole(rows.tokens, rows.targets) / rows.targets.numel()).item()
    exchange.check(file, MODEL)
    for other, options in ((plan(), {}), (plan(dp=2), {"zero": 3}), (plan(tp=2, pp=2), {})):
        found = minipar.run(loss_from, other, TrainConfig(**{**vars(CONFIG), **options}), file)
        assert found == pytest.approx([truth] * other.size, rel=1e-5)


def test_tied_weights_are_there_once(tmp_path: Path) -> None:
    config = TrainConfig(**{**vars(CONFIG), "model": GPTConfig(**{**vars(MODEL), "tied": True})})
    minipar.run(train_and_save, plan(pp=2), config, str(tmp_path / "run"))
    exchange.export(str(tmp_path / "run"), str(tmp_path / "w.safetensors"))
    names = load_file(tmp_path / "w.safetensors").keys()
    assert "embedding.word.weight" in names and "head.output.weight" not in names
    exchange.check(str(tmp_path / "w.safetensors"), config.model)
    minipar.run(loss_from, plan(pp=3), config, str(tmp_path / "w.safetensors"))


# What is refused.


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        out, err = capsys.readouterr()
        assert end.value.code == 2 and err.count("\n") == 1 and not out
        return err

    return refused


def test_a_file_with_other_weights_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, "w.safetensors")
    (tmp_path / "x").write_text("no weights")
    assert "no embedding.position" in refused("train", "--init", "w.safetensors")
    assert "cannot read weights from 'x'" in refused("train", "--init", "x")
    assert "cannot read weights from 'missing'" in refused("train", "--init", "missing")
    assert "give one of them" in refused("train", "--init", "w.safetensors", "--resume", "missing")


def test_nothing_to_export_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "no checkpoint" in refused("export", "missing", "w.safetensors")
    assert "cannot write 'no/w'" in refused("export", "missing", "no/w")
    assert list(tmp_path.iterdir()) == []


# TensorBoard.


def test_tensorboard_reads_what_a_run_wrote(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    step = {"event": "step", "norm": 1.0, "loss_scale": 2.0, "lr": 0.1, "skipped": False, "seconds": 0.5, "tokens": 100,
            "bytes": {}, "flops": 1e9, "world_size": 2}  # fmt: skip
    with metrics.Log(None, str(tmp_path), peak_flops=1e10) as log:
        log.hear({"event": "start", "begin": 0})
        for number in range(3):
            log.hear({**step, "step": number, "loss": 5.0 - number})
        log.hear({**step, "step": 3, "loss": float("nan")})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [(0, 5.0), (1, 4.0), (2, 3.0)]
    assert events.Scalars("mfu")[0].value == pytest.approx(1e9 / 0.5 / 2 / 1e10)


# Places.


@pytest.fixture
def saved(tmp_path: Path) -> str:
    minipar.run(train_and_save, plan(), CONFIG, str(tmp_path / "run"))
    return str(tmp_path / "run")


def test_the_checkpoint_that_is_exported_is_not_written_into(saved: str) -> None:
    part = next(Path(saved).glob("step-*/*.distcp"))
    before = part.read_bytes()
    with pytest.raises(ValueError, match="name a file elsewhere"):
        exchange.export(saved, str(part))
    assert part.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_device_stays_a_device_and_a_full_one_is_told(saved: str) -> None:
    with pytest.raises(ValueError, match="No space left on device"):
        exchange.export(saved, "/dev/full")
    assert Path("/dev/full").is_char_device()


def test_an_exported_file_has_the_rights_of_any_other(saved: str, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    exchange.export(saved, str(tmp_path / "w"))
    assert (tmp_path / "w").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_weights_of_other_heads_are_another_model(saved: str, tmp_path: Path) -> None:
    exchange.export(saved, str(tmp_path / "w"))
    other = GPTConfig(**{**vars(MODEL), "heads": 2, "kv_heads": 1})
    with pytest.raises(ValueError, match="heads 4 there, 2 here"):
        exchange.check(str(tmp_path / "w"), other)
