"""How good a checkpoint is: its loss on text that it has not seen, and a sample of what it writes.

    minipar evaluate run --dp 2
    minipar generate run --prompt "def main" --tokens 100

Idea    The held-out text is read once, in order, forward only; losses are added up over all ranks and divided by the
        tokens, so that any topology gives one process's answer. A sample is drawn token by token: the model's last
        logits, a temperature, the likeliest few.
Cost    A third of a training step for each batch: no backward, nothing kept.
Read    `corpus.py` for what is held out; `checkpoint.py` for what is loaded.
"""

from __future__ import annotations

from math import exp
from pathlib import Path
from typing import Any

import torch

from minipar import checkpoint, corpus, launch
from minipar.batches import EvaluationBatches
from minipar.checkpoint import Saved
from minipar.corpus import Tokenizer
from minipar.mesh import Mesh, plan
from minipar.model import GPTConfig
from minipar.train import Engine, TrainConfig, check

TOKENIZER = "tokenizer.json"


def evaluate(folder: str, mesh: Mesh, *, data: str | None = None, rows: int = 16, zero: int = 0) -> dict[str, Any]:
    """The mean loss over the held-out text, its perplexity, and over how many tokens; on the ranks of a mesh.

    `data` is the text; by default that with which the checkpoint was trained. Raises `ValueError`, one line, for a
    checkpoint, a text or a topology that does not fit.
    """
    saved = _found(folder)
    config = TrainConfig(model=GPTConfig(**saved.model), global_batch=rows, micro_batches=1, zero=zero)
    check(config, mesh.shape)
    prepared = corpus.prepare(data if data is not None else saved.data, vocab=config.model.vocab)
    known = _tokenizer(saved)
    if known is not None and known.json != prepared.tokenizer.json:
        raise ValueError(
            f"this text gives other tokens than those with which {saved.path} was trained: give the same --data"
        )
    held_out = prepared.held_out
    EvaluationBatches(held_out, sequence=config.model.sequence, global_batch=rows)
    answers = launch.run(_evaluate, mesh, config, saved, held_out, backend="gloo", timeout=None)
    losses, tokens = answers[0]
    return {
        "step": saved.step,
        "loss": losses / tokens,
        "perplexity": exp(min(700.0, losses / tokens)),
        "tokens": tokens,
    }


def _evaluate(mesh: Mesh, config: TrainConfig, saved: Saved, held_out: Any) -> tuple[float, int]:
    engine = Engine(mesh, config)
    checkpoint.load(engine, saved)
    batches = EvaluationBatches(held_out, sequence=config.model.sequence, global_batch=config.global_batch)
    rows, losses, tokens = config.global_batch // mesh.dp.size, 0.0, 0.0
    for step in range(len(batches)):
        batch = batches.rows(step, mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows)
        loss, learned = engine.evaluate(batch)
        losses, tokens = losses + loss, tokens + learned
    return losses, int(tokens)


def generate(
    folder: str, prompt: str, *, tokens: int = 100, temperature: float = 0.8, top_k: int = 40, seed: int = 0
) -> str:
    """The prompt and what the model writes after it: the same for the same seed. `temperature` 0 takes the likeliest
    token each time; `top_k` 0 chooses among all. Raises `ValueError`, one line, for what does not fit."""
    saved = _found(folder)
    tokenizer = _tokenizer(saved)
    if tokenizer is None:
        raise ValueError(f"{saved.path} has no tokenizer: it was saved without minipar train; name one that was")
    begin = tokenizer.encode(prompt.encode("utf-8", "replace").decode()) or [0]
    drawn: list[list[int]] = launch.run(
        _generate, plan(), saved, begin, (tokens, temperature, top_k, seed), backend="gloo", timeout=None
    )
    return tokenizer.decode(drawn[0] if prompt else drawn[0][1:])


def _generate(mesh: Mesh, saved: Saved, begin: list[int], how: tuple[int, float, int, int]) -> list[int]:
    (tokens, temperature, top_k, seed), config = how, GPTConfig(**saved.model)
    engine = Engine(mesh, TrainConfig(model=config, global_batch=1, micro_batches=1))
    checkpoint.load(engine, saved)
    model, draw = engine.stages[0].eval(), torch.Generator().manual_seed(seed)
    text = list(begin)
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(torch.tensor([text[-config.sequence :]]))[0, -1].float()
            text.append(sample(logits, temperature, top_k, draw))
    return text


def sample(logits: torch.Tensor, temperature: float, top_k: int, draw: torch.Generator) -> int:
    """A token from the logits of all, `[V]`."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    likely = torch.softmax((logits - logits.max()).double() / temperature, 0)
    return int(torch.multinomial(likely, 1, generator=draw))


def _found(folder: str) -> Saved:
    saved = checkpoint.find(folder)
    checkpoint.check_whole(saved)
    return saved


def _tokenizer(saved: Saved) -> Tokenizer | None:
    path = Path(saved.path) / TOKENIZER
    return Tokenizer(path.read_text(encoding="utf-8")) if path.is_file() else None
