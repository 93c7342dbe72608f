"""Any schedule on any stages gives the gradients of one process, in the schedule's order, and holds what it says."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import cloudpickle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import minipar
from minipar import tp
from minipar.batches import IGNORED
from minipar.comm import Message
from minipar.dp import DataParallel
from minipar.facts import Span
from minipar.mesh import plan
from minipar.model import GPT, GPTConfig, build, materialise
from minipar.pp import MicroBatch, Pipeline, split_layers
from minipar.schedule import by_name, in_flight
from minipar.trace import ActivationMeter

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TIGHT = {"rtol": 1e-10, "atol": 1e-15}


class Worlds:
    """A world of each size, its ranks one pipeline; started again after a failure has ended it."""

    def __init__(self) -> None:
        self.open: dict[int, minipar.World] = {}

    def run(self, ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        if ranks not in self.open or self.open[ranks].closed:
            self.open[ranks] = minipar.World(plan(pp=ranks))
        return self.open[ranks].run(fn, *args)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    for world in worlds.open.values():
        world.close()


# Which layers each stage holds.


@given(st.integers(1, 9), st.data(), st.integers(1, 40), st.integers(1, 3000), st.integers(1, 50))
@settings(deadline=None, max_examples=200)
def test_no_other_split_has_a_faster_slowest_stage(
    layers: int, data: Any, hidden: int, vocab: int, sequence: int
) -> None:
    stages = data.draw(st.integers(1, layers))
    layer = 24 * hidden**2 + 4 * sequence * hidden  # FLOPs a token, as the module says
    head = 2 * hidden * vocab

    def slowest(sizes: list[int]) -> int:
        return max(size * layer + (head if stage == stages - 1 else 0) for stage, size in enumerate(sizes))

    every = (
        [b - a for a, b in zip((0, *ends), (*ends, layers), strict=True)]
        for ends in combinations(range(1, layers), stages - 1)
    )
    config = GPTConfig(layers=layers, hidden=hidden, heads=1, vocab=vocab, sequence=sequence)
    got = split_layers(config, stages)
    assert [layer for stage in got for layer in stage] == list(range(layers))  # none dropped, none twice
    assert all(len(stage) >= 1 for stage in got)
    assert slowest([len(stage) for stage in got]) == min(slowest(sizes) for sizes in every)


def test_the_last_stage_gets_fewer_layers_when_the_vocabulary_is_large() -> None:
    sizes = lambda vocab: [len(s) for s in split_layers(GPTConfig(8, 64, 4, vocab, 16), 2)]
    assert sizes(16) == [4, 4]
    assert sizes(64 * 12 * 2) == [5, 3]  # a projection that costs nearly two layers


def test_more_stages_than_layers_are_refused_with_the_choice() -> None:
    with pytest.raises(ValueError, match="3 layers cannot fill 4 stages: choose at most 3 stages, or more layers"):
        split_layers(GPTConfig(layers=3), 4)


# A pipeline on ranks, and the same model in one process.

CONFIG = GPTConfig(layers=7, hidden=10, heads=2, vocab=11, sequence=4, dropout=0.2)
ROWS = 6


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets of six rows; the first row has no target, the second only one."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(CONFIG.vocab, (ROWS, CONFIG.sequence), generator=generator)
    targets = torch.randint(CONFIG.vocab, (ROWS, CONFIG.sequence), generator=generator)
    targets[0], targets[1, 1:] = IGNORED, IGNORED
    return tokens, targets


@dataclass
class Seen:
    loss: float
    gradients: dict[str, Tensor]
    spans: list[Span]
    messages: list[Message]
    held: int  # the most micro-batches at once
    left: int  # what is still held at the end
    peak_bytes: int


class Watched(Pipeline):
    """Counts the micro-batches whose activations, or postponed weight gradients, are held after each action."""

    held = 0

    def _compute(self, action: Any) -> None:
        super()._compute(action)
        self.held = max(self.held, len(self.kept.keys() | self._postponed.keys()))


def stages_of(mesh: Any, config: GPTConfig, stages: int) -> dict[int, GPT]:
    layers, held = split_layers(config, stages), {}
    for stage in range(mesh.pp.rank, stages, mesh.pp.size):
        with torch.device("meta"):
            part = GPT(config, layers[stage], first=stage == 0, last=stage == stages - 1)
            tp.parallelize(part, mesh.tp)
        held[stage] = materialise(part, 0, torch.float64)
    return held


def run_pipeline(mesh: Any, name: str, micro_batches: int, chunks: int, config: GPTConfig, meter: bool = False) -> Seen:
    schedule = by_name(name, mesh.pp.size, micro_batches, chunks).validate()
    stages = stages_of(mesh, config, schedule.stages)
    named = {name: p for part in stages.values() for name, p in part.named_parameters()}
    replicas = DataParallel(named.values(), mesh.dp)
    tokens, targets = batch()
    parts = zip(*(x.chunk(micro_batches) for x in (tokens, targets, torch.arange(ROWS))), strict=True)
    pipeline = Watched(stages, schedule, mesh.pp, dtype=torch.float64, device="cpu")
    mesh.world.wire.messages.clear()
    replicas.start(micro_batches)
    watch = ActivationMeter(named.values())
    rows = [MicroBatch(x, y, samples.tolist()) for x, y, samples in parts]
    shape = (ROWS // micro_batches, config.sequence, config.hidden)
    if meter:
        with watch:
            loss = pipeline.run(rows, shape, 1 / 7)
    else:
        loss = pipeline.run(rows, shape, 1 / 7)
    replicas.finish()
    left = len(pipeline.kept) + len(pipeline._postponed) + len(pipeline.results) + len(pipeline.arriving)
    gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    return Seen(
        loss.item(),
        gradients,
        pipeline.spans,
        list(mesh.world.wire.messages),
        pipeline.held,
        left + watch.now,
        watch.peak,
    )


def in_one_process(config: GPTConfig) -> tuple[float, dict[str, Tensor]]:
    model = build(config, 0, torch.float64)
    model.draw.samples = list(range(ROWS))
    loss = model(*batch())
    (loss / 7).backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(by_rank: list[Seen], config: GPTConfig) -> None:
    loss, gradients = in_one_process(config)
    assert [seen.loss for seen in by_rank[:-1]] == [0.0] * (len(by_rank) - 1)  # the last stage's rank knows it
    assert by_rank[-1].loss == pytest.approx(loss, rel=1e-12)
    got = {name: gradient for seen in by_rank for name, gradient in seen.gradients.items()}
    assert got.keys() == gradients.keys() and sum(len(seen.gradients) for seen in by_rank) == len(got)
    for name, want in gradients.items():
        torch.testing.assert_close(got[name], want, msg=lambda text, n=name: f"{n}: {text}", **TIGHT)


PLAIN = [(1, 1), (1, 3), (2, 1), (2, 6), (3, 2), (4, 3), (4, 6)]  # ranks, micro-batches
CHUNKED = [(1, 3, 2), (1, 6, 7), (2, 2, 2), (2, 6, 3), (3, 3, 2), (3, 6, 2)]  # and chunks
RUNS = [
    *((name, *sizes, 1) for name in ("naive", "gpipe", "1f1b", "zb-h1") for sizes in PLAIN),
    *(("interleaved", *sizes) for sizes in CHUNKED),
]


@pytest.mark.parametrize(("name", "ranks", "micro_batches", "chunks"), RUNS)
def test_every_schedule_gives_the_gradients_of_one_process_in_its_own_order(
    worlds: Worlds, name: str, ranks: int, micro_batches: int, chunks: int
) -> None:
    by_rank = worlds.run(ranks, run_pipeline, name, micro_batches, chunks, CONFIG)
    check(by_rank, CONFIG)
    schedule = by_name(name, ranks, micro_batches, chunks)
    for rank, seen in enumerate(by_rank):
        assert [span.action for span in seen.spans] == list(schedule.actions[rank])
        assert all(a.end <= b.start for a, b in pairwise(seen.spans))
        assert seen.left == 0


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_the_number_of_micro_batches_changes_no_gradient(worlds: Worlds, name: str) -> None:
    runs = [worlds.run(2, run_pipeline, name, micro_batches, 1, CONFIG) for micro_batches in (1, 2, 3, 6)]
    for run in runs[1:]:
        for seen, first in zip(run, runs[0], strict=True):
            for parameter, gradient in first.gradients.items():
                torch.testing.assert_close(seen.gradients[parameter], gradient, **TIGHT)


def test_one_layer_for_each_of_four_ranks_and_one_micro_batch_of_one_row(worlds: Worlds) -> None:
    config = replace(CONFIG, layers=4)
    for name in ("1f1b", "zb-h1"):
        check(worlds.run(4, run_pipeline, name, 6, 1, config), config)


# What is sent.


@pytest.mark.parametrize(
    ("name", "ranks", "chunks"), [("gpipe", 2, 1), ("1f1b", 4, 1), ("zb-h1", 3, 1), ("interleaved", 2, 2)]
)
def test_at_each_border_an_activation_goes_down_and_a_gradient_up_for_each_micro_batch(
    worlds: Worlds, name: str, ranks: int, chunks: int
) -> None:
    by_rank, stages, m = worlds.run(ranks, run_pipeline, name, 6, chunks, CONFIG), ranks * chunks, 6
    size = (ROWS // m) * CONFIG.sequence * CONFIG.hidden * 8
    want = Counter[tuple[int, int, int, str]]()
    for border in range(stages - 1):
        above, below = border % ranks, (border + 1) % ranks
        for i in range(m):
            want[above, below, size, f"pp.F{i} of stage {border}"] += 1
            want[below, above, size, f"pp.B{i} of stage {border + 1}"] += 1
    sent = Counter(
        (rank, m.peer, m.bytes, m.tag) for rank, seen in enumerate(by_rank) for m in seen.messages if m.op == "send"
    )
    received = Counter(
        (m.peer, rank, size, m.tag) for rank, seen in enumerate(by_rank) for m in seen.messages if m.op == "recv"
    )
    assert sent == want and received == want
    assert all(m.group == "pp" for seen in by_rank for m in seen.messages)


def test_a_receive_is_posted_before_its_turn_so_that_the_message_travels_meanwhile(worlds: Worlds) -> None:
    last = worlds.run(2, run_pipeline, "1f1b", 6, 1, CONFIG)[1]
    posted = {m.tag: m.launched for m in last.messages if m.op == "recv"}
    ended = {span.action.place: span.end for span in last.spans}
    for i in range(1, 6):
        assert posted[f"pp.F{i} of stage 0"] < ended[f"B{i - 1} of stage 1"]


def test_a_send_does_not_wait_for_the_other_side(worlds: Worlds) -> None:
    """GPipe's first stage is through with all forwards before the second has sent any gradient."""
    first, second = worlds.run(2, run_pipeline, "gpipe", 6, 1, CONFIG)
    launched = [m for m in first.messages if m.op == "send"]
    assert len(launched) == 6
    assert all(m.launched < min(s.launched for s in second.messages if s.op == "send") for m in launched)


# What is held.


@pytest.mark.parametrize(("name", "ranks", "micro_batches", "chunks"), RUNS)
def test_a_rank_holds_as_many_micro_batches_as_the_schedule_says(
    worlds: Worlds, name: str, ranks: int, micro_batches: int, chunks: int
) -> None:
    by_rank = worlds.run(ranks, run_pipeline, name, micro_batches, chunks, CONFIG)
    schedule = by_name(name, ranks, micro_batches, chunks)
    assert [seen.held for seen in by_rank] == in_flight(schedule)


@pytest.mark.parametrize(("name", "held"), [("gpipe", [6, 6, 6, 6]), ("1f1b", [4, 3, 2, 1]), ("naive", [1, 1, 1, 1])])
def test_autograd_keeps_the_activations_of_as_many_micro_batches_and_no_more(
    worlds: Worlds, name: str, held: list[int]
) -> None:
    config = replace(CONFIG, dropout=0.0)
    one = [seen.peak_bytes for seen in worlds.run(4, run_pipeline, "naive", 6, 1, config, True)]
    many = [seen.peak_bytes for seen in worlds.run(4, run_pipeline, name, 6, 1, config, True)]
    assert many == [peak * count for peak, count in zip(one, held, strict=True)]
