"""ZeRO steps as the unsharded optimizer does, for any optimizer and size, and holds only its share in between."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

import minipar
from minipar import ledger, report, trace
from minipar.batches import RandomBatches
from minipar.mesh import plan
from minipar.model import GPTConfig
from minipar.train import Engine, TrainConfig
from minipar.zero import Zero

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TIGHT = {"rtol": 1e-12, "atol": 1e-14}
STAGES = [1, 2, 3]
Options = dict[str, Any]


class Worlds:
    """A world of each size, started when first used, and again after a failure has ended it."""

    def __init__(self) -> None:
        self.open: dict[int, minipar.World] = {}

    def run(self, ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        if ranks not in self.open or self.open[ranks].closed:
            self.open[ranks] = minipar.World(ranks)
        return self.open[ranks].run(fn, *args)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    for world in worlds.open.values():
        world.close()


# Models of several units, one after the other.


def words() -> list[nn.Module]:
    """11 words, width 5, 7 inside, and a unit of one value, smaller than any group."""
    return [
        nn.Embedding(11, 5),
        nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)),
        nn.Linear(5, 3),
        nn.PReLU(),
    ]


def numbers() -> list[nn.Module]:
    """The first unit has two layers, and its input needs no gradient."""
    first = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 5, bias=False))
    return [first, nn.LayerNorm(5), nn.Linear(5, 3)]


def tied() -> list[nn.Module]:
    """The last unit uses the first one's matrix."""
    units = [nn.Embedding(11, 5), nn.Linear(5, 5), nn.Linear(5, 11, bias=False)]
    units[2].weight = units[0].weight
    return units


def prepared(make: Callable[[], list[nn.Module]], frozen: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(*make()).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    return model


def rows_of(step: int, rows: int = 12) -> Tensor:
    return torch.randint(11, (rows, 2), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Sequential, rows: Tensor) -> Tensor:
    """A sum over rows, other for each."""
    x = rows if isinstance(model[0], nn.Embedding) else rows.double().unsqueeze(-1) / 5
    return (model(x) ** 2 * (1 + rows.unsqueeze(-1))).sum() / 100


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.02),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.02),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.02),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.02),
}


def split_options(model: nn.Module) -> list[Options]:
    """Matrices decay, vectors don't."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def in_one_process(options: Options, ranks: int) -> list[Tensor]:
    """The weights after three steps with torch's own optimizer on whole batches."""
    model = prepared(options["model"], options["frozen"])
    optimizer = OPTIMIZERS[options["optimizer"]](split_options(model))
    for step in range(3):
        optimizer.zero_grad()
        for rows in rows_of(step).chunk(ranks)[: options["ranks_with_rows"]]:
            loss_of(model, rows).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def on_a_rank(group: Any, options: Options) -> list[Tensor]:
    """The same with ZeRO, on this rank's rows; models start different on each rank."""
    model = prepared(options["model"], options["frozen"], seed=group.rank)
    replicas = Zero(
        list(model),
        group,
        stage=options["stage"],
        parameter_groups=split_options(model),
        bucket_bytes=options["bucket_bytes"],
    )
    optimizer = OPTIMIZERS[options["optimizer"]](replicas.parameter_groups())
    for step in range(3):
        replicas.start(options["micro_batches"])
        rows = rows_of(step).chunk(group.size)[group.rank]
        for part in rows.chunk(options["micro_batches"]):
            with_rows = float(group.rank < options["ranks_with_rows"])
            (loss_of(model, part) * with_rows).backward()
        replicas.finish()
        replicas.step(optimizer)
    replicas.gather()
    return [p.detach().clone() for p in model.parameters()]


PLAIN: Options = {
    "model": words,
    "frozen": "",
    "stage": 1,
    "optimizer": "AdamW",
    "bucket_bytes": 300,
    "micro_batches": 1,
    "ranks_with_rows": 4,
}


def check_steps(worlds: Worlds, ranks: int, options: Options, exactly: bool = False) -> None:
    first, *others = worlds.run(ranks, on_a_rank, options)
    for got, want in zip(first, in_one_process(options, ranks), strict=True):
        if exactly:
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got, want, **TIGHT)
    assert all(torch.equal(a, b) for other in others for a, b in zip(other, first, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
def test_steps_equal_those_of_the_unsharded_optimizer(worlds: Worlds, stage: int, optimizer: str, ranks: int) -> None:
    check_steps(worlds, ranks, PLAIN | {"stage": stage, "optimizer": optimizer})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
def test_where_no_sum_is_rounded_they_are_equal_bit_for_bit(worlds: Worlds, stage: int, optimizer: str) -> None:
    options = PLAIN | {"stage": stage, "optimizer": optimizer, "ranks_with_rows": 1}  # the others add zeros
    check_steps(worlds, 3, options, exactly=True)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "change",
    [
        {"micro_batches": 3},
        {"bucket_bytes": 1},
        {"bucket_bytes": 8 << 20, "micro_batches": 2},
        {"frozen": "0."},
        {"frozen": "1.0", "micro_batches": 2},
        {"frozen": "2.weight", "bucket_bytes": 8 << 20},
        {"model": numbers},
        {"model": numbers, "micro_batches": 3},
        {"model": numbers, "frozen": "0.0"},
        {"model": tied},
        {"model": tied, "micro_batches": 2},
    ],
    ids=lambda change: ", ".join(f"{k} {getattr(v, '__name__', v)}" for k, v in change.items()),
)
def test_micro_batches_buckets_and_frozen_and_tied_parameters_change_nothing(
    worlds: Worlds, stage: int, change: Options
) -> None:
    check_steps(worlds, 3, PLAIN | {"stage": stage} | change)


# Gradients, as they lie on the ranks.


def shares(group: Any, stage: int, micro_batches: int, unused: bool = False) -> list[tuple[str, int, Tensor]]:
    model = prepared(words, "")
    if unused:
        model[1] = Either(group.rank)
    names = {id(p): name for name, p in model.named_parameters()}
    replicas = Zero(list(model), group, stage=stage, bucket_bytes=300)
    for _ in range(2):  # the second step must not remember the first
        replicas.start(micro_batches)
        for part in rows_of(0).chunk(group.size)[group.rank].chunk(micro_batches):
            loss_of(model, part).backward()
        replicas.finish()
    return [(names[id(piece.parameter)], piece.start, piece.gradient.clone()) for piece in replicas.pieces()]


class Either(nn.Module):
    """A unit of two layers, of which rank 0 uses both and the others one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rank, self.a, self.b = rank, nn.Linear(5, 5).double(), nn.Linear(5, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if self.rank else self.a(x) + self.b(x)


def joined(by_rank: list[list[tuple[str, int, Tensor]]], model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients from all ranks' pieces, each element of which must be on exactly one."""
    whole = {name: torch.full((p.numel(),), float("nan"), dtype=p.dtype) for name, p in model.named_parameters()}
    for pieces in by_rank:
        for name, start, gradient in pieces:
            place = whole[name][start : start + len(gradient)]
            assert bool(place.isnan().all()), f"{name} is on two ranks"
            place.copy_(gradient)
    return whole


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_the_shares_of_all_ranks_are_the_raw_gradient_of_the_whole_batch(
    worlds: Worlds, stage: int, ranks: int, micro_batches: int
) -> None:
    model = prepared(words, "")
    loss_of(model, rows_of(0)).backward()
    whole = joined(worlds.run(ranks, shares, stage, micro_batches), model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(whole[name], parameter.grad.flatten(), **TIGHT)


def test_parameters_of_one_value_lie_on_one_rank_and_the_others_hold_padding(worlds: Worlds) -> None:
    by_rank = worlds.run(4, shares, 3, 1)  # PReLU is a unit, and so a bucket, of its own
    assert ["3.weight" in {name for name, _, _ in pieces} for pieces in by_rank] == [True, False, False, False]


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_without_a_gradient_on_one_rank_gets_the_others(worlds: Worlds, stage: int) -> None:
    whole: dict[str, Tensor] = {}
    for rank, rows in enumerate(rows_of(0).chunk(2)):
        model = prepared(words, "")
        model[1] = Either(rank)
        loss_of(model, rows).backward()
        for name, p in model.named_parameters():
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            whole[name] = whole.get(name, torch.zeros_like(p)) + gradient
    got = joined(worlds.run(2, shares, stage, 1, True), model)
    for name, want in whole.items():
        torch.testing.assert_close(got[name], want.flatten(), **TIGHT)


def two_dtypes(group: Any, stage: int) -> list[torch.dtype]:
    model = prepared(words, "")
    model[2].float()
    model[3].float()
    replicas = Zero(list(model), group, stage=stage)
    replicas.gather()
    return [p.dtype for p in model.parameters()]


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_of_different_dtypes_keep_to_buckets_of_their_own(worlds: Worlds, stage: int) -> None:
    f64, f32 = torch.float64, torch.float32
    assert worlds.run(2, two_dtypes, stage) == [[f64] * 5 + [f32] * 3] * 2


# What is sent.


def sent(group: Any, stage: int, micro_batches: int) -> list[str]:
    model = prepared(words, "")
    replicas = Zero(list(model), group, stage=stage, bucket_bytes=300)
    optimizer = torch.optim.SGD(replicas.parameter_groups(), lr=0.1)
    group.wire.messages.clear()
    replicas.start(micro_batches)
    for part in rows_of(0).chunk(group.size)[group.rank].chunk(micro_batches):
        loss_of(model, part).backward()
    replicas.finish()
    replicas.step(optimizer)
    return [f"{m.op} {m.tag.removeprefix('zero.')}" for m in group.wire.messages]


@pytest.mark.parametrize(("stage", "times"), [(1, 1), (2, 2)])
def test_stages_1_and_2_scatter_gradients_in_order_and_then_gather_parameters(
    worlds: Worlds, stage: int, times: int
) -> None:
    for messages in worlds.run(2, sent, stage, 2):
        buckets = range(messages[-1].count("bucket") + int(messages[-1].split()[-1]))
        grads = [f"reduce_scatter grad bucket {bucket}" for bucket in buckets]
        assert len(grads) > 2
        assert messages == grads * times + [f"all_gather parameters bucket {bucket}" for bucket in buckets]


def test_stage_3_gathers_each_unit_forward_and_backward_and_scatters_behind(worlds: Worlds) -> None:
    gather, scatter = "all_gather parameters bucket", "reduce_scatter grad bucket"
    once = [  # bucket 3 is the first unit's, bucket 0 the last one's; each is fetched before its turn
        *(f"{gather} {bucket}" for bucket in (3, 2, 1, 0)),
        *(f"{gather} 0", f"{gather} 1", f"{scatter} 0", f"{gather} 2", f"{scatter} 1"),
        *(f"{gather} 3", f"{scatter} 2", f"{scatter} 3"),
    ]
    for messages in worlds.run(2, sent, 3, 2):
        assert messages == once * 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_group_of_one_says_nothing(worlds: Worlds, stage: int) -> None:
    assert worlds.run(1, sent, stage, 2) == [[]]


# Stage 3: what is here, and when.


class Probe(nn.Module):
    """A unit that notes, in its forward and in its backward, which units' parameters are here."""

    def __init__(self, inner: nn.Module, note: Callable[[str], None], name: str) -> None:
        super().__init__()
        self.inner, self.note, self.name = inner, note, name

    def forward(self, x: Tensor) -> Tensor:
        self.note(f"F{self.name}")
        y = self.inner(x)
        y.register_hook(lambda grad: self.note(f"B{self.name}"))
        self.note(f"end of F{self.name}")
        return y


def look(group: Any, make: Callable[[], list[nn.Module]]) -> dict[str, Any]:
    seen: list[tuple[str, list[int], float]] = []

    def here() -> list[int]:
        return [n for n, unit in enumerate(units) if any(p.untyped_storage().nbytes() for p in unit.parameters())]

    def note(what: str) -> None:
        seen.append((what, here(), perf_counter()))

    units = [Probe(unit.double(), note, str(n)) for n, unit in enumerate(make())]
    model = nn.Sequential(*units)
    replicas = Zero(units, group, stage=3)
    optimizer = torch.optim.SGD(replicas.parameter_groups(), lr=0.1)
    group.wire.messages.clear()
    note("before")
    replicas.start()
    x = rows_of(0) if make is words else rows_of(0).double().unsqueeze(-1)
    model(x).sum().backward()
    note("after backward")
    replicas.finish()
    replicas.step(optimizer)
    note("after step")
    gathers = [(m.tag, m.launched, m.finished) for m in group.wire.messages if m.op == "all_gather"]
    replicas.gather()
    note("gathered")
    return {
        "seen": {what: where for what, where, _ in seen},
        "at": {what: at for what, _, at in seen},
        "gathers": gathers,
    }


@pytest.mark.parametrize("make", [words, numbers])
@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_are_here_only_around_their_use(
    worlds: Worlds, ranks: int, make: Callable[[], list[nn.Module]]
) -> None:
    for answer in worlds.run(ranks, look, make):
        seen, last = answer["seen"], len(make()) - 1
        assert seen["before"] == seen["after backward"] == seen["after step"] == []
        for unit in range(last + 1):
            assert seen[f"F{unit}"] == [n for n in (unit, unit + 1) if n <= last]  # itself and the next, on its way
            assert seen[f"B{unit}"] == [n for n in (unit - 1, unit) if n >= 0]
        assert seen["gathered"] == list(range(last + 1))


def test_a_units_parameters_are_sent_for_before_the_unit_in_front_of_it_has_ended(worlds: Worlds) -> None:
    for answer in worlds.run(2, look, words):
        forward = answer["gathers"][:4]
        assert [tag for tag, _, _ in forward] == [f"zero.parameters bucket {bucket}" for bucket in (3, 2, 1, 0)]
        for unit in range(1, 4):
            _, launched, _ = forward[unit]
            assert launched < answer["at"][f"F{unit - 1}"]
        backward = answer["gathers"][4:]
        for unit in range(3):
            _, launched, _ = backward[3 - unit]
            assert launched < answer["at"][f"B{unit + 1}"]


def evaluate(group: Any) -> tuple[Tensor, int]:
    model = prepared(words, "")
    replicas = Zero(list(model), group, stage=3)
    with torch.no_grad():
        y = model(rows_of(0))
    return y, sum(p.untyped_storage().nbytes() for p in model.parameters()) + 0 * len(replicas.shards)


@pytest.mark.parametrize("ranks", [1, 2])
def test_stage_3_can_be_evaluated_without_gradients_and_keeps_nothing(worlds: Worlds, ranks: int) -> None:
    for y, here in worlds.run(ranks, evaluate):
        torch.testing.assert_close(y, prepared(words, "")(rows_of(0)).detach(), **TIGHT)
        assert here == 0


# Memory.

MODEL = GPTConfig(layers=2, hidden=64, heads=4, vocab=512, sequence=16)


def footprint_of(mesh: Any, zero: int, global_batch: int) -> tuple[trace.Footprint, int, int]:
    """What a rank holds after a step, the shares of its buckets, and how many values it owns."""
    config = TrainConfig(model=MODEL, global_batch=global_batch, micro_batches=1, zero=zero, bucket_bytes=40_000)
    engine = Engine(mesh, config)
    batches = RandomBatches(vocab=512, sequence=16, global_batch=global_batch)
    rows = global_batch // mesh.dp.size
    engine.step(batches.rows(0, mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows))
    held = trace.footprint(engine.replicas.held_bytes(), engine.optimizer, 0)
    if not isinstance(engine.replicas, Zero):
        return held, 0, 0
    shares = sum(shard.flat.share for shard in engine.replicas.shards)
    return held, shares, sum(len(piece.gradient) for piece in engine.replicas.pieces())


@pytest.mark.parametrize("dp", [1, 3, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_model_states_take_the_bytes_that_the_ledger_says_within_a_hundredth(zero: int, dp: int) -> None:
    config = TrainConfig(model=MODEL, global_batch=4 * dp, zero=zero)
    count = ledger.rank_parameters(report.shape_of(config, plan(dp=dp)), 0)
    want = ledger.model_state_bytes(count, dp=dp, zero=zero, precision="fp32")
    held = minipar.run(footprint_of, plan(dp=dp), zero, 4 * dp)
    for got, _, _ in held:
        assert got.parameters == pytest.approx(want.weights, rel=0.01)
        assert got.gradients == pytest.approx(want.gradients, rel=0.01)
        assert got.optimizer == pytest.approx(want.optimizer, rel=0.01)
    if zero:
        assert sum(values for _, _, values in held) == count  # each value's optimizer states are on one rank
        padding = sum(shares for _, shares, _ in held) - count
        assert 0 <= padding < dp * 20  # less than a value for each rank and bucket


def held_exactly(group: Any, stage: int) -> tuple[dict[str, int], list[int]]:
    model = prepared(words, "0.")
    replicas = Zero(list(model), group, stage=stage)
    return replicas.held_bytes(), [shard.flat.numel for shard in replicas.shards]


@pytest.mark.parametrize(
    ("stage", "buckets"),
    [(1, [102]), (2, [102]), (3, [3, 18, 84])],  # 101 values; and by unit 82, 18, 1: filled up to a multiple of 3
)
def test_what_is_held_beyond_the_share_is_padding_and_frozen_parameters(
    worlds: Worlds, stage: int, buckets: list[int]
) -> None:
    for held, sizes in worlds.run(3, held_exactly, stage):
        assert sizes == buckets
        whole, share, frozen = 8 * sum(buckets), 8 * sum(buckets) // 3, 8 * 11 * 5
        assert held["parameters"] == frozen + (share if stage == 3 else whole)
        assert held["gradients"] == (whole if stage == 1 else share)
        assert held["buffers"] == 0


# What is refused.


def test_a_stage_that_does_not_exist_is_refused_with_the_choices() -> None:
    group = minipar.comm.Group(None, "dp", range(2), 0, minipar.comm.Wire())
    with pytest.raises(ValueError, match=r"ZeRO has no stage 4: choose 1 \(optimizer\), 2 \(gradients\) or 3 \(param"):
        Zero([nn.Linear(2, 2)], group, stage=4)
