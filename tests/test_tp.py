"""Layers cut over ranks give the outputs and the raw gradients of one process, padding or not, and talk as often as
the papers say."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import log
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import minipar
from minipar import tp
from minipar.batches import IGNORED
from minipar.comm import Message
from minipar.dp import DataParallel
from minipar.mesh import plan
from minipar.model import GPT, GPTConfig, build, materialise
from minipar.split import Split, split_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TIGHT = {"rtol": 1e-10, "atol": 1e-13}  # float64


class Worlds:
    """A world of each size, its ranks one tensor-parallel group; started again after a failure has ended it."""

    def __init__(self) -> None:
        self.open: dict[int, minipar.World] = {}

    def run(self, ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        if ranks not in self.open or self.open[ranks].closed:
            self.open[ranks] = minipar.World(plan(tp=ranks))
        return self.open[ranks].run(fn, *args)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    for world in worlds.open.values():
        world.close()


def border_of(mesh: Any, by_sequence: bool) -> tp.Border:
    return tp.BySequence(mesh.tp) if by_sequence else tp.Whole(mesh.tp)


def noise(name: str, shape: tuple[int, ...]) -> Tensor:
    """Random numbers that belong to a name."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def set_weights(module: nn.Module) -> None:
    """Give every parameter, or this rank's piece of it, the numbers that belong to its name: no zeros, no ones."""
    for name, parameter in module.named_parameters():
        split, shape = split_of(parameter), tuple(parameter.shape)
        whole = 0.3 * noise(name, split.whole_shape(shape) if split else shape)
        parameter.data = split.take(whole) if split else whole


@dataclass
class Seen:
    """What a module did on one rank: its output, the gradient of its input, and of its parameters by name."""

    output: Tensor
    input_gradient: Tensor | None
    gradients: dict[str, Tensor | None]
    splits: dict[str, Split | None]
    slices: set[str]


def observe(module: nn.Module, x: Tensor, output: Tensor, loss: Tensor) -> Seen:
    loss.backward()
    named = dict(module.named_parameters())
    return Seen(
        output.detach(),
        x.grad,
        {name: None if p.grad is None else p.grad.clone() for name, p in named.items()},
        {name: split_of(p) for name, p in named.items()},
        {name for name, p in named.items() if tp.sees_a_slice(p)},
    )


def gradient_of(name: str, by_rank: list[Seen]) -> Tensor:
    """The whole parameter's gradient, from all ranks' pieces or partial sums."""
    split = by_rank[0].splits[name]
    pieces = [seen.gradients[name] for seen in by_rank]
    if split is not None:
        return split.join(pieces)  # type: ignore[arg-type]
    if name in by_rank[0].slices:
        return torch.stack(pieces).sum(0)  # type: ignore[arg-type]
    assert all(torch.equal(piece, pieces[0]) for piece in pieces), f"{name} differs between ranks"  # type: ignore[arg-type]
    return pieces[0]  # type: ignore[return-value]


def check_gradients(by_rank: list[Seen], truth: Seen) -> None:
    assert by_rank[0].gradients.keys() == truth.gradients.keys()
    for name, want in truth.gradients.items():
        torch.testing.assert_close(gradient_of(name, by_rank), want, msg=lambda text, n=name: f"{n}: {text}", **TIGHT)


def check_padding(by_rank: list[Seen]) -> int:
    """No gradient where a piece is padding; how many values that are."""
    padding = 0
    for name, split in by_rank[0].splits.items():
        if split is not None:
            pieces = [seen.gradients[name] for seen in by_rank]
            whole = split.join(pieces)  # type: ignore[arg-type]
            for rank, piece in enumerate(pieces):
                real = split.take(torch.ones_like(whole), rank).bool()
                assert piece is not None and not piece[~real].any(), name
                padding += int((~real).sum())
    return padding


# A pair of layers: width 5, 11 inside, so that nothing divides.


class Pair(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def whole_pair() -> Pair:
    return Pair(nn.Linear(5, 11, dtype=torch.float64), nn.Linear(11, 5, dtype=torch.float64))


X, WEIGHTS_OF_LOSS = noise("x", (2, 12, 5)), noise("loss", (2, 12, 5))  # [B, T, D]


def pair_on_a_rank(mesh: Any, by_sequence: bool, written: bool) -> Seen:
    border, whole = border_of(mesh, by_sequence), whole_pair()
    pair = Pair(tp.ColumnLinear(whole.up, border), tp.RowLinear(whole.down, border))  # type: ignore[arg-type]
    set_weights(pair)
    replicas = DataParallel(pair.parameters(), mesh.dp) if written else None
    mine = lambda x: x.chunk(mesh.tp.size, 1)[mesh.tp.rank] if by_sequence else x
    x = mine(X).clone().requires_grad_()
    if replicas:
        replicas.start()
    y = pair(x)
    seen = observe(pair, x, y, (y * mine(WEIGHTS_OF_LOSS)).sum())
    if replicas:
        replicas.finish()
        seen.gradients = {name: p.grad.clone() for name, p in pair.named_parameters() if p.grad is not None}
    return seen


def pair_in_one_process() -> Seen:
    pair, x = whole_pair(), X.clone().requires_grad_()
    set_weights(pair)
    y = pair(x)
    return observe(pair, x, y, (y * WEIGHTS_OF_LOSS).sum())


@pytest.mark.parametrize("written", [False, True], ids=["by autograd", "by the layer"])
@pytest.mark.parametrize("by_sequence", [False, True], ids=["whole", "by sequence"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_column_and_a_row_linear_are_the_pair_in_one_process(
    worlds: Worlds, size: int, by_sequence: bool, written: bool
) -> None:
    by_rank, truth = worlds.run(size, pair_on_a_rank, by_sequence, written), pair_in_one_process()
    for what in ("output", "input_gradient"):
        got = [getattr(seen, what) for seen in by_rank]
        if by_sequence:
            torch.testing.assert_close(torch.cat(got, 1), getattr(truth, what), **TIGHT)
        else:
            assert all(torch.equal(tensor, got[0]) for tensor in got)
            torch.testing.assert_close(got[0], getattr(truth, what), **TIGHT)
    check_gradients(by_rank, truth)
    assert check_padding(by_rank) == {1: 0, 2: 1, 3: 1, 4: 1}[size] * 11  # a row of up, its bias, a column of down


def bias_alone(mesh: Any, by_sequence: bool) -> tuple[Tensor, Tensor]:
    whole = nn.Linear(11, 5, dtype=torch.float64)
    row = tp.RowLinear(whole, border_of(mesh, by_sequence))
    row.weight.data.zero_()
    row.bias.data = noise("bias", (5,))
    y = row(torch.ones(2, 12, row.weight.shape[1], dtype=torch.float64))
    y.sum().backward()
    assert row.bias.grad is not None
    return y.detach(), row.bias.grad


@pytest.mark.parametrize("by_sequence", [False, True], ids=["whole", "by sequence"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_bias_of_a_row_linear_is_added_once_and_its_gradient_is_whole(
    worlds: Worlds, size: int, by_sequence: bool
) -> None:
    for y, gradient in worlds.run(size, bias_alone, by_sequence):
        assert torch.equal(y, noise("bias", (5,)).expand_as(y))
        assert torch.equal(gradient, torch.full((5,), 24.0, dtype=torch.float64))  # every token, not those of a slice


def without_bias(mesh: Any) -> Tensor:
    whole = [nn.Linear(5, 11, bias=False, dtype=torch.float64), nn.Linear(11, 5, bias=False, dtype=torch.float64)]
    border = border_of(mesh, False)
    pair = Pair(tp.ColumnLinear(whole[0], border), tp.RowLinear(whole[1], border))
    set_weights(pair)
    x = X.clone().requires_grad_()
    pair(x).sum().backward()
    assert x.grad is not None
    return x.grad


def test_layers_without_a_bias_can_be_cut_too(worlds: Worlds) -> None:
    pair = Pair(nn.Linear(5, 11, bias=False), nn.Linear(11, 5, bias=False))
    set_weights(pair)
    x = X.clone().requires_grad_()
    pair(x).sum().backward()
    for got in worlds.run(2, without_bias):
        torch.testing.assert_close(got, x.grad, **TIGHT)


# Blocks: heads, and grouped key/value heads.

SMALL = GPTConfig(layers=2, hidden=20, heads=4, vocab=11, sequence=8)  # heads of width 5


def inputs(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """Tokens and targets of two rows, some of the targets ignored."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab, (2, config.sequence), generator=generator)
    targets = torch.randint(config.vocab, (2, config.sequence), generator=generator)
    targets[0, :3] = IGNORED
    return tokens, targets


def blocks_on_a_rank(mesh: Any, config: GPTConfig, by_sequence: bool) -> Seen:
    with torch.device("meta"):
        part = tp.parallelize(GPT(config, first=False, last=False), mesh.tp, sequence_parallel=by_sequence)
    model = materialise(part, 0, torch.float64)
    return run_blocks(model, mesh.tp.size if by_sequence else 1, mesh.tp.rank if by_sequence else 0)


def run_blocks(model: GPT, slices: int = 1, mine: int = 0) -> Seen:
    config = model.config
    set_weights(model)
    model.draw.samples = [4, 7]
    shape = (2, config.sequence, config.hidden)
    x = noise("activations", shape).chunk(slices, 1)[mine].clone().requires_grad_()
    y = model(x)
    return observe(model, x, y, (y * noise("loss", shape).chunk(slices, 1)[mine]).sum())


BLOCKS = {
    "four heads": (SMALL, 2),
    "a head for each rank": (SMALL, 4),
    "grouped heads": (replace(SMALL, kv_heads=2), 2),
    "grouped heads, one each": (replace(SMALL, heads=20, kv_heads=4), 4),
    "dropout": (replace(SMALL, dropout=0.3), 2),
    "dropout and grouped heads": (replace(SMALL, heads=20, kv_heads=4, dropout=0.3), 4),
    "one rank": (replace(SMALL, kv_heads=1, dropout=0.3), 1),
    "three ranks": (replace(SMALL, hidden=12, heads=6, kv_heads=3, sequence=9), 3),
}


@pytest.mark.parametrize("by_sequence", [False, True], ids=["whole", "by sequence"])
@pytest.mark.parametrize(("config", "size"), BLOCKS.values(), ids=BLOCKS)
def test_blocks_cut_by_heads_are_those_of_one_process(
    worlds: Worlds, config: GPTConfig, size: int, by_sequence: bool
) -> None:
    by_rank = worlds.run(size, blocks_on_a_rank, config, by_sequence)
    with torch.device("meta"):
        part = GPT(config, first=False, last=False)
    truth = run_blocks(materialise(part, 0, torch.float64))
    for what in ("output", "input_gradient"):
        got = [getattr(seen, what) for seen in by_rank]
        torch.testing.assert_close(torch.cat(got, 1) if by_sequence else got[0], getattr(truth, what), **TIGHT)
    check_gradients(by_rank, truth)


# The vocabulary.


def embedding_on_a_rank(mesh: Any, words: int, by_sequence: bool) -> Seen:
    whole = nn.Embedding(words, 5, dtype=torch.float64)
    embedding = tp.VocabularyEmbedding(whole, border_of(mesh, by_sequence))
    set_weights(embedding)
    mine = lambda x: x.chunk(mesh.tp.size, 1)[mesh.tp.rank] if by_sequence else x
    tokens = torch.arange(24).reshape(2, 12) % words
    y = embedding(tokens)
    return observe(embedding, tokens, y, (y * mine(WEIGHTS_OF_LOSS)).sum())


@pytest.mark.parametrize("by_sequence", [False, True], ids=["whole", "by sequence"])
@pytest.mark.parametrize(("words", "size"), [(11, 1), (11, 2), (11, 4), (5, 2), (5, 4)])
def test_each_rank_knows_some_words_and_together_they_know_all(
    worlds: Worlds, words: int, size: int, by_sequence: bool
) -> None:
    by_rank = worlds.run(size, embedding_on_a_rank, words, by_sequence)
    whole = nn.Embedding(words, 5, dtype=torch.float64)
    set_weights(whole)
    tokens = torch.arange(24).reshape(2, 12) % words
    y = whole(tokens)
    truth = observe(whole, tokens, y, (y * WEIGHTS_OF_LOSS).sum())
    got = [seen.output for seen in by_rank]
    torch.testing.assert_close(torch.cat(got, 1) if by_sequence else got[0], truth.output, **TIGHT)
    check_gradients(by_rank, truth)
    check_padding(by_rank)


def entropy_on_a_rank(mesh: Any, logits: Tensor, targets: Tensor, padding: float) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of this rank's logits. Where there is no word, the logit is `padding`."""
    split = Split(1, mesh.tp.rank, mesh.tp.size, (logits.shape[1],))
    words = int(split.take(torch.ones_like(logits))[0].sum())
    mine = split.take(logits).contiguous()
    mine[:, words:] = padding
    mine.requires_grad_()
    loss = tp.cross_entropy(mine, targets, words, mesh.tp)
    (3.0 * loss).backward()
    assert mine.grad is not None
    return loss.detach(), mine.grad


def entropy_in_one_process(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    (3.0 * loss).backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.mark.parametrize("padding", [0.0, 50.0, float("nan")])
@pytest.mark.parametrize(("words", "size"), [(11, 1), (11, 2), (11, 4), (5, 2), (5, 4)])
def test_the_loss_over_a_cut_vocabulary_is_that_of_one_process_whatever_the_padding_holds(
    worlds: Worlds, words: int, size: int, padding: float
) -> None:
    logits, targets = 4 * noise("logits", (13, words)), torch.arange(13) % words
    targets[[2, 7]] = IGNORED
    want, gradient = entropy_in_one_process(logits, targets)
    by_rank = worlds.run(size, entropy_on_a_rank, logits, targets, padding)
    for loss, _ in by_rank:
        torch.testing.assert_close(loss, want, **TIGHT)
    pieces = [piece for _, piece in by_rank]
    split = Split(1, 0, size, (words,))
    torch.testing.assert_close(split.join(pieces), gradient, **TIGHT)
    assert torch.cat(pieces, 1).count_nonzero() == gradient.count_nonzero()  # nothing in the padding


@pytest.mark.parametrize("size", [2, 4])
def test_five_words_padded_to_six_or_eight_cost_ln_5_when_all_are_equally_likely(worlds: Worlds, size: int) -> None:
    for loss, _ in worlds.run(size, entropy_on_a_rank, torch.zeros(1, 5, dtype=torch.float64), torch.tensor([4]), 0.0):
        assert loss.item() == pytest.approx(log(5), rel=1e-14)


def test_huge_logits_neither_overflow_nor_lose_the_loss(worlds: Worlds) -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4, 0.0, 9.99e3], [-1e4, -1e4, -1e4, -1e4, -1e4]], dtype=torch.float64)
    targets = torch.tensor([4, 2])
    want, _ = entropy_in_one_process(logits, targets)
    for loss, gradient in worlds.run(2, entropy_on_a_rank, logits, targets, 0.0):
        torch.testing.assert_close(loss, want, **TIGHT)
        assert bool(gradient.isfinite().all())


def test_a_nan_among_the_logits_of_any_rank_reaches_the_loss_on_all(worlds: Worlds) -> None:
    for column in range(4):
        logits = torch.zeros(2, 4, dtype=torch.float64)
        logits[0, column] = float("nan")
        losses = [loss for loss, _ in worlds.run(2, entropy_on_a_rank, logits, torch.tensor([0, 1]), 0.0)]
        assert all(bool(loss.isnan()) for loss in losses), column  # gloo's maximum may lose a NaN: the sums do not


def test_ignored_targets_cost_nothing_and_teach_nothing(worlds: Worlds) -> None:
    logits, targets = noise("logits", (4, 5)), torch.full((4,), IGNORED)
    for loss, gradient in worlds.run(2, entropy_on_a_rank, logits, targets, 0.0):
        assert loss.item() == 0 and not gradient.any()


def test_bfloat16_logits_are_summed_up_in_float32(worlds: Worlds) -> None:
    logits, targets = noise("logits", (6, 11)).bfloat16(), torch.arange(6)
    want, _ = entropy_in_one_process(logits.float(), targets)
    for loss, gradient in worlds.run(2, entropy_on_a_rank, logits, targets, 0.0):
        assert (loss.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
        torch.testing.assert_close(loss, want)


# The whole model.

MODELS = {
    "plain": (SMALL, 2),
    "four ranks": (SMALL, 4),
    "five words": (replace(SMALL, vocab=5), 4),
    "tied": (replace(SMALL, tied=True), 2),
    "grouped, tied, dropout, five words": (replace(SMALL, kv_heads=2, tied=True, dropout=0.2, vocab=5), 2),
    "one rank": (replace(SMALL, tied=True, dropout=0.2), 1),
}


def model_on_a_rank(mesh: Any, config: GPTConfig, by_sequence: bool, written: bool, spoil: Any = None) -> Seen:
    if spoil:
        spoil()
    with torch.device("meta"):
        part = tp.parallelize(GPT(config), mesh.tp, sequence_parallel=by_sequence)
    model = materialise(part, 0, torch.float64)
    set_weights(model)
    replicas = DataParallel(model.parameters(), mesh.dp) if written else None
    if replicas:
        replicas.start()
    seen = run_model(model)
    if replicas:
        replicas.finish()
        seen.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return seen


def run_model(model: GPT) -> Seen:
    model.draw.samples = [4, 7]
    tokens, targets = inputs(model.config)
    loss = model(tokens, targets)
    return observe(model, tokens, loss, loss)


def model_in_one_process(config: GPTConfig) -> Seen:
    model = build(config, 0, torch.float64)
    set_weights(model)
    return run_model(model)


@pytest.mark.parametrize("written", [False, True], ids=["by autograd", "by the layer"])
@pytest.mark.parametrize("by_sequence", [False, True], ids=["whole", "by sequence"])
@pytest.mark.parametrize(("config", "size"), MODELS.values(), ids=MODELS)
def test_the_cut_model_has_the_loss_and_every_gradient_of_one_process(
    worlds: Worlds, config: GPTConfig, size: int, by_sequence: bool, written: bool
) -> None:
    by_rank, truth = worlds.run(size, model_on_a_rank, config, by_sequence, written), model_in_one_process(config)
    for seen in by_rank:
        torch.testing.assert_close(seen.output, truth.output, **TIGHT)
    check_gradients(by_rank, truth)
    check_padding(by_rank)


def test_by_sequence_exactly_the_gains_of_layer_norms_and_the_positions_see_a_slice(worlds: Worlds) -> None:
    (seen, _) = worlds.run(2, model_on_a_rank, SMALL, True, False)
    norms = ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "head.norm"]
    assert seen.slices == {"embedding.position"} | {f"{norm}.{what}" for norm in norms for what in ("weight", "bias")}
    truth = model_in_one_process(SMALL)
    for name in seen.slices:  # one rank's alone is not the gradient: the sum over tp is still to come
        alone, want = seen.gradients[name], truth.gradients[name]
        assert alone is not None and not torch.allclose(alone, want), name  # type: ignore[arg-type]


def test_without_sequence_parallel_no_parameter_sees_a_slice(worlds: Worlds) -> None:
    assert worlds.run(2, model_on_a_rank, SMALL, False, False)[0].slices == set()


def logits_on_a_rank(mesh: Any, config: GPTConfig) -> Tensor:
    with torch.device("meta"):
        part = tp.parallelize(GPT(config), mesh.tp)
    model = materialise(part, 0, torch.float64)
    set_weights(model)
    return model(inputs(config)[0]).detach()


def test_without_targets_each_rank_gives_its_slice_of_the_logits(worlds: Worlds) -> None:
    model = build(SMALL, 0, torch.float64)
    set_weights(model)
    pieces = worlds.run(4, logits_on_a_rank, SMALL)
    torch.testing.assert_close(torch.cat(pieces, -1)[..., :11], model(inputs(SMALL)[0]).detach(), **TIGHT)


# Frozen parameters.


def frozen_on_a_rank(mesh: Any, by_sequence: bool, frozen: str) -> tuple[Seen, float]:
    with torch.device("meta"):
        part = tp.parallelize(GPT(SMALL), mesh.tp, sequence_parallel=by_sequence)
    model = materialise(part, 0, torch.float64)
    set_weights(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    seen = run_model(model)
    return seen, float(mesh.tp.all_reduce(torch.ones(())))  # the ranks still understand each other


@pytest.mark.parametrize("by_sequence", [False, True], ids=["whole", "by sequence"])
@pytest.mark.parametrize("frozen", ["mlp.up.weight", "mlp.down", "embedding", "attention.out.bias", "blocks"])
def test_frozen_parameters_get_no_gradient_and_the_others_theirs(
    worlds: Worlds, frozen: str, by_sequence: bool
) -> None:
    answers = worlds.run(2, frozen_on_a_rank, by_sequence, frozen)
    assert [total for _, total in answers] == [2.0, 2.0]
    by_rank, truth = [seen for seen, _ in answers], model_in_one_process(SMALL)
    for name, want in truth.gradients.items():
        if frozen in name:
            assert all(seen.gradients[name] is None for seen in by_rank)
        else:
            torch.testing.assert_close(gradient_of(name, by_rank), want, **TIGHT)


# How often and how much.


def layer_messages(mesh: Any, by_sequence: bool) -> tuple[list[Message], list[Message]]:
    """Those of one layer's forward, and of its backward: B=2, T=8, D=20 in float64."""
    config = replace(SMALL, layers=1)
    with torch.device("meta"):
        part = tp.parallelize(GPT(config, first=False, last=False), mesh.tp, sequence_parallel=by_sequence)
    model = materialise(part, 0, torch.float64)
    rows = config.sequence // (mesh.tp.size if by_sequence else 1)
    x = torch.ones(2, rows, config.hidden, dtype=torch.float64, requires_grad=True)
    messages = mesh.tp.wire.messages
    messages.clear()
    y = model(x)
    forward = list(messages)
    messages.clear()
    y.sum().backward()
    return forward, list(messages)


def counted(messages: list[Message]) -> Counter[tuple[str, str, int]]:
    return Counter((message.op, message.group, message.bytes) for message in messages)


WHOLE_BYTES = 2 * 8 * 20 * 8


@pytest.mark.parametrize("size", [2, 4])
def test_a_layer_needs_two_all_reduces_forward_and_two_backward(worlds: Worlds, size: int) -> None:
    for forward, backward in worlds.run(size, layer_messages, False):
        assert counted(forward) == {("all_reduce", "tp", WHOLE_BYTES): 2}
        assert counted(backward) == {("all_reduce", "tp", WHOLE_BYTES): 2}


@pytest.mark.parametrize("size", [2, 4])
def test_by_sequence_each_becomes_a_gather_and_a_scatter_and_backward_gathers_again(worlds: Worlds, size: int) -> None:
    for forward, backward in worlds.run(size, layer_messages, True):
        gather, scatter = ("all_gather", "tp", WHOLE_BYTES // size), ("reduce_scatter", "tp", WHOLE_BYTES)
        assert counted(forward) == {gather: 2, scatter: 2}
        assert counted(backward) == {gather: 2 + 2, scatter: 2}  # what each rank did not keep comes once more


def test_one_rank_says_nothing(worlds: Worlds) -> None:
    assert worlds.run(1, layer_messages, False) == [([], [])]
    assert worlds.run(1, layer_messages, True) == [([], [])]


def model_messages(mesh: Any, by_sequence: bool) -> Counter[tuple[str, str, int]]:
    mesh.tp.wire.messages.clear()
    model_on_a_rank(mesh, SMALL, by_sequence, False)
    return counted(mesh.tp.wire.messages)


def test_a_model_adds_one_for_the_embedding_one_for_the_head_and_three_numbers_a_token(worlds: Worlds) -> None:
    for seen in worlds.run(2, model_messages, False):
        assert seen == {
            ("all_reduce", "tp", WHOLE_BYTES): 4 * SMALL.layers + 1 + 1,
            ("all_reduce", "tp", 2 * 8 * 8): 1,  # the maximum of each token's logits
            ("all_reduce", "tp", 2 * 2 * 8 * 8): 1,  # the sum of exponentials, and the right logit
        }


# Known-wrong implementations, so that what is above is known to see them.


def double_backward() -> None:
    """`torch.distributed.nn.functional.all_reduce`: its backward adds up the ranks' gradients, which are equal."""
    tp.Whole.leave_backward = lambda self, grad: self.group.all_reduce(grad.clone())  # type: ignore[method-assign]


def no_f() -> None:
    """f forgotten: each rank's input gradient is only the part that came through its own slice."""
    from minipar.comm import Pending

    tp.Whole.enter_backward = lambda self, grad: Pending(self.group.wire, None, [], lambda: grad)  # type: ignore[method-assign]


def bias_on_every_rank() -> None:
    from torch.nn.functional import linear

    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.postpone = layer, layer.postpone
        return layer.border.leave(linear(x, weight, bias))

    tp._RowLinear.forward = staticmethod(forward)  # type: ignore[method-assign]


def padding_counts() -> None:
    real = tp.cross_entropy
    tp.cross_entropy = lambda logits, targets, words, group: real(logits, targets, logits.shape[1], group)


def largest_difference(by_rank: list[Seen], truth: Seen) -> float:
    worst = float((by_rank[0].output - truth.output).abs() / truth.output.abs())
    for name, want in truth.gradients.items():
        split, pieces = by_rank[0].splits[name], [seen.gradients[name] for seen in by_rank]
        got = split.join(pieces) if split else pieces[0]  # type: ignore[arg-type]
        worst = max(worst, float((got - want).abs().max() / want.abs().max()))  # type: ignore[operator, union-attr]
    return worst


@pytest.mark.parametrize("spoil", [double_backward, no_f, bias_on_every_rank, padding_counts])
def test_a_wrong_implementation_is_seen(spoil: Callable[[], None]) -> None:
    truth = model_in_one_process(SMALL)
    right = minipar.run(model_on_a_rank, plan(tp=2), SMALL, False, False)
    assert largest_difference(right, truth) < 1e-10
    wrong = minipar.run(model_on_a_rank, plan(tp=2), SMALL, False, False, spoil)
    assert largest_difference(wrong, truth) > 1e-3


def test_a_doubled_backward_makes_the_last_layers_gradients_as_many_times_too_large_as_there_are_ranks() -> None:
    truth = model_in_one_process(SMALL)
    wrong = minipar.run(model_on_a_rank, plan(tp=2), SMALL, False, False, double_backward)
    torch.testing.assert_close(
        gradient_of("blocks.1.mlp.down.weight", wrong), 2 * truth.gradients["blocks.1.mlp.down.weight"], **TIGHT
    )  # type: ignore[operator]


# What cannot be cut.


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((6, 6, 0, 4), "6 heads cannot be shared by tp=4 ranks: choose tp from 1, 2, 3, 6"),
        ((6, 2, 0, 3), "2 key/value heads cannot be shared by tp=3 ranks: choose tp from 1, 2"),
        ((8, 4, 6, 4), "6 positions of the sequence cannot be shared by tp=4 ranks: choose tp from 1, 2"),
        ((4, 2, 0, 8), "4 heads cannot be shared by tp=8 ranks: choose tp from 1, 2"),
    ],
)
def test_what_cannot_be_shared_is_said_with_the_choices(numbers: tuple[int, int, int, int], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        tp.check(*numbers)
    assert str(caught.value) == text
