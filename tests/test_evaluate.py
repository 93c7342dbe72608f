"""The loss on held-out text is one process's on every topology; what is generated is what was drawn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import minipar
from minipar import cli, evaluate
from minipar.batches import EvaluationBatches, RandomBatches
from minipar.evaluate import sample
from minipar.mesh import Mesh, plan
from minipar.model import GPTConfig, build
from minipar.train import Engine, TrainConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MODEL = GPTConfig(layers=4, hidden=12, heads=4, kv_heads=2, vocab=11, sequence=6, dropout=0.3)
CONFIG = TrainConfig(model=MODEL, global_batch=4, micro_batches=2, precision="fp64", warmup=0)
TEXT = RandomBatches(vocab=11, sequence=52, global_batch=1)[0].tokens[0].numpy()  # 52 tokens: 8 rows and 3 more targets


def held_out_loss(mesh: Mesh, config: TrainConfig) -> tuple[float, float, list[bool]]:
    engine = Engine(mesh, config)
    batches = EvaluationBatches(TEXT, sequence=6, global_batch=4)
    losses = tokens = 0.0
    for step in range(len(batches)):
        rows = 4 // mesh.dp.size
        loss, learned = engine.evaluate(batches.rows(step, mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows))
        losses, tokens = losses + loss, tokens + learned
    return losses / tokens, tokens, [part.training for part in engine.stages.values()]


TOPOLOGIES: list[tuple[Mesh, dict[str, Any]]] = [
    (plan(), {}),
    (plan(dp=2), {}),
    (plan(dp=4), {"zero": 3, "micro_batches": 1}),
    (plan(tp=2), {"sequence_parallel": True}),
    (plan(pp=4), {}),
    (plan(pp=2), {"schedule": "interleaved", "chunks": 2}),
    (plan(dp=2, tp=2, pp=2), {"zero": 1, "recompute": "full"}),
    (plan(pp=2), {"model": GPTConfig(**{**vars(MODEL), "tied": True})}),
]


@pytest.mark.parametrize(("mesh", "changes"), TOPOLOGIES, ids=str)
def test_any_topology_has_the_loss_of_one_process_without_dropout(mesh: Mesh, changes: dict[str, Any]) -> None:
    config = TrainConfig(**{**vars(CONFIG), **changes})
    whole = build(config.model, config.seed, torch.float64).eval()
    inputs, targets = torch.from_numpy(TEXT[:-1].copy()), torch.from_numpy(TEXT[1:].copy())
    truth = sum(
        whole(inputs[None, i : i + 6], targets[None, i : i + 6]).item() for i in range(0, len(inputs), 6)
    ) / len(targets)
    for loss, tokens, training in minipar.run(held_out_loss, mesh, config):
        assert loss == pytest.approx(truth, rel=1e-12) and tokens == 51
        assert all(training)  # as it was before


# A sample.


def test_temperature_0_and_one_candidate_take_the_likeliest() -> None:
    draw, logits = torch.Generator().manual_seed(0), torch.tensor([0.1, 3.0, 2.9, -1.0])
    assert {sample(logits, 0, 0, draw) for _ in range(20)} == {1}
    assert {sample(logits, 5.0, 1, draw) for _ in range(20)} == {1}


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    draw, logits = torch.Generator().manual_seed(0), torch.tensor([0.0, 1.0, 2.0, 3.0])
    counts = torch.bincount(torch.tensor([sample(logits, 2.0, 0, draw) for _ in range(4000)]), minlength=4) / 4000
    assert torch.allclose(counts, torch.softmax(logits / 2, 0), atol=0.03)
    few = {sample(logits, 2.0, 2, draw) for _ in range(200)}
    assert few == {2, 3}


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A run on a text of few words; then any command, what it printed, and its exit code on failure."""
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text(f"the cat {number} sat on the mat and {number * number} " * 60)
    monkeypatch.setenv("MINIPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        out, err = capsys.readouterr()
        assert int(end.value.code or 0) == code, err
        return out if code == 0 else err

    small = "--layers 2 --hidden 16 --heads 2 --vocab 300 --sequence 16 --global-batch 8 --dp 2 --steps 4"
    command("train", *small.split(), "--data", "text", "--save", "run", "--json")
    return command


def test_from_text_to_a_sample(trained: Callable[..., str]) -> None:
    alone, together = (
        trained("evaluate", "run", *degrees) for degrees in ((), ("--dp", "2", "--tp", "2", "--zero", "3"))
    )
    assert alone == together and alone.startswith("step 4: loss ") and "held-out tokens" in alone
    one, again, other = (
        trained("generate", "run", "--prompt", "the cat", "--tokens", "12", "--seed", seed) for seed in "112"
    )
    assert one == again != other and one.startswith("the cat")
    assert trained("generate", "run", "--tokens", "3", "--temperature", "0")


def test_what_cannot_be_evaluated_is_refused_in_one_line(trained: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for number in range(8):
        (tmp_path / "other" / f"{number}.txt").write_text(f"quite another text, {number} of them, with words " * 60)
    for arguments, said in (
        (("evaluate", "missing"), "no checkpoint"),
        (("evaluate", "run", "--data", "other"), "give the same --data"),
        (("evaluate", "run", "--tp", "3"), "2 heads"),
        (("evaluate", "run", "--dp", "3"), "choose a multiple of 3"),
        (("generate", "missing"), "no checkpoint"),
        (("generate", "run", "--temperature", "-1"), "out of range"),
    ):
        error = trained(*arguments, code=2)
        assert said in error and len(error.strip().splitlines()) == 1


def test_a_checkpoint_without_its_tokenizer_says_so(trained: Callable[..., str], tmp_path: Path) -> None:
    from minipar import checkpoint

    saved = checkpoint.find("run")
    (saved.path / evaluate.TOKENIZER).unlink()
    assert "is damaged" in trained("generate", "run", code=2)
