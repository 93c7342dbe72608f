"""The GPT in one process: its size, its first weights, its masks, its loss; what every cut has to reproduce."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

from minipar import ledger, tp
from minipar.batches import IGNORED
from minipar.comm import Group, Wire
from minipar.model import GPT, Draw, Dropout, GPTConfig, build, initial_weight, materialise
from minipar.split import Split, split_of

SMALL = GPTConfig(layers=3, hidden=12, heads=4, vocab=11, sequence=6)
VARIANTS = {
    "plain": SMALL,
    "tied": replace(SMALL, tied=True),
    "grouped heads": replace(SMALL, kv_heads=2),
    "one key head, tied": replace(SMALL, kv_heads=1, tied=True),
    "width 5, 7 layers": GPTConfig(layers=7, hidden=5, heads=1, vocab=5, sequence=3),
}


def tokens_and_targets(config: GPTConfig, rows: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = (rows, config.sequence)
    return torch.randint(config.vocab, shape, generator=generator), torch.randint(
        config.vocab, shape, generator=generator
    )


# Its size.


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_the_model_has_as_many_parameters_as_the_ledger_says(config: GPTConfig) -> None:
    count = sum(parameter.numel() for parameter in build(config).parameters())
    assert count == ledger.parameters(
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        vocab=config.vocab,
        sequence=config.sequence,
        kv_heads=config.kv_heads,
        tied=config.tied,
    )


def test_a_block_has_twelve_squares_and_thirteen_widths_as_the_module_says() -> None:
    (block,) = build(replace(SMALL, layers=1)).layers
    assert sum(parameter.numel() for parameter in block.parameters()) == 12 * 12**2 + 13 * 12


# Its first weights.


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("cuts", [[1], [2], [1, 2]], ids=["1|2", "2|1", "1|1|1"])
def test_first_weights_are_the_same_in_every_stage(config: GPTConfig, cuts: list[int]) -> None:
    whole = dict(build(config, seed=3).named_parameters(remove_duplicate=False))
    ends = [*cuts, config.layers]
    found: dict[str, Tensor] = {}
    for stage, (start, end) in enumerate(zip([0, *cuts], ends, strict=True)):
        with torch.device("meta"):
            part = GPT(config, range(start, end), first=stage == 0, last=end == config.layers, seed=3)
        found |= dict(materialise(part, 3).named_parameters(remove_duplicate=False))
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def pretended(rank: int, size: int) -> Group:
    return Group(None, "tp", range(size), rank, Wire())


@pytest.mark.parametrize(
    ("name", "size"),
    [("plain", 1), ("plain", 2), ("plain", 4), ("tied", 4), ("grouped heads", 2), ("width 5, 7 layers", 1)],
)
def test_first_weights_are_the_same_in_every_slice(name: str, size: int) -> None:
    config = VARIANTS[name]
    whole = dict(build(config, seed=3).named_parameters())
    slices = []
    for rank in range(size):
        with torch.device("meta"):
            part = tp.parallelize(GPT(config, seed=3), pretended(rank, size))
        slices.append(dict(materialise(part, 3).named_parameters()))
    assert slices[0].keys() == whole.keys()
    for name, want in whole.items():
        split = split_of(slices[0][name])
        pieces = [part[name].detach() for part in slices]
        assert torch.equal(split.join(pieces) if split else pieces[0], want), name


def test_first_weights_depend_on_the_seed_and_on_the_name() -> None:
    weight = lambda seed, layer: initial_weight(f"blocks.{layer}.mlp.up.weight", (48, 12), SMALL, seed)
    assert torch.equal(weight(0, 0), weight(0, 0))
    assert not torch.equal(weight(0, 0), weight(1, 0))
    assert not torch.equal(weight(0, 0), weight(0, 1))


def test_projections_into_the_residual_stream_start_smaller_biases_at_zero_and_gains_at_one() -> None:
    config = GPTConfig(layers=8, hidden=128, heads=4, vocab=64, sequence=16)
    named = {name: parameter.detach() for name, parameter in build(config).named_parameters()}
    assert named["blocks.0.mlp.up.weight"].std() == pytest.approx(0.02, rel=0.02)
    assert named["blocks.0.mlp.down.weight"].std() == pytest.approx(0.02 / 4, rel=0.02)  # sqrt(2 * 8)
    assert named["blocks.3.attention.out.weight"].std() == pytest.approx(0.02 / 4, rel=0.02)
    for name, parameter in named.items():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert bool((parameter == 1).all()), name


# What it computes.


def by_hand(model: GPT, tokens: Tensor) -> Tensor:
    """The logits, token by token and head by head, as the paper says it."""
    config, p = model.config, dict(model.named_parameters(remove_duplicate=False))
    norm = lambda x, name: (
        (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"]
        + p[f"{name}.bias"]
    )
    size, group = config.head_size, config.heads // config.key_value_heads
    x = p["embedding.word.weight"][tokens] + p["embedding.position"][: tokens.shape[1]]
    for layer in range(config.layers):
        name = f"blocks.{layer}"
        qkv = norm(x, f"{name}.norm1") @ p[f"{name}.attention.qkv.weight"].t() + p[f"{name}.attention.qkv.bias"]
        q, k, v = qkv.split([config.heads * size, config.key_value_heads * size, config.key_value_heads * size], -1)
        mixed = torch.zeros_like(x)
        for head in range(config.heads):
            mine, shared = slice(head * size, (head + 1) * size), head // group
            keys, values = (part[..., shared * size : (shared + 1) * size] for part in (k, v))
            for t in range(tokens.shape[1]):
                scores = torch.einsum("bd,bsd->bs", q[:, t, mine], keys[:, : t + 1]) / size**0.5
                mixed[:, t, mine] = torch.einsum("bs,bsd->bd", scores.softmax(-1), values[:, : t + 1])
        x = x + mixed @ p[f"{name}.attention.out.weight"].t() + p[f"{name}.attention.out.bias"]
        y = norm(x, f"{name}.norm2") @ p[f"{name}.mlp.up.weight"].t() + p[f"{name}.mlp.up.bias"]
        y = 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))
        x = x + y @ p[f"{name}.mlp.down.weight"].t() + p[f"{name}.mlp.down.bias"]
    return norm(x, "head.norm") @ p["head.output.weight"].t()


def shaken(config: GPTConfig, seed: int = 0) -> GPT:
    """A model whose biases and gains are not zeros and ones, and whose scores are far from equal."""
    model = build(config, seed, torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
    return model


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_the_logits_are_those_computed_by_hand(config: GPTConfig) -> None:
    model, (tokens, _) = shaken(config), tokens_and_targets(config)
    torch.testing.assert_close(model(tokens), by_hand(model, tokens), rtol=1e-12, atol=1e-12)


def test_attention_that_drops_nothing_is_the_same_with_and_without_the_fused_kernel() -> None:
    config = replace(SMALL, kv_heads=2, dropout=1e-15)
    model, (tokens, _) = shaken(config), tokens_and_targets(config)
    model.draw.samples = [0, 1, 2]
    spelled_out = model.train()(tokens)
    torch.testing.assert_close(spelled_out, model.eval()(tokens), rtol=1e-12, atol=1e-12)


def test_a_token_changes_no_logits_before_its_own() -> None:
    model, (tokens, _) = shaken(SMALL), tokens_and_targets(SMALL)
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % SMALL.vocab
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_a_shorter_text_uses_the_first_positions() -> None:
    model, (tokens, _) = shaken(SMALL), tokens_and_targets(SMALL)
    torch.testing.assert_close(model(tokens[:, :4]), model(tokens)[:, :4], rtol=1e-12, atol=1e-12)


def test_stages_one_after_the_other_are_the_model() -> None:
    config = replace(SMALL, layers=7)
    tokens, targets = tokens_and_targets(config)
    x: Tensor = tokens
    for start, end in ((0, 2), (2, 6), (6, 7)):
        with torch.device("meta"):
            part = GPT(config, range(start, end), first=start == 0, last=end == 7)
        stage = materialise(part, 0, torch.float64)
        x = stage(x, targets) if end == 7 else stage(x)
    torch.testing.assert_close(x, build(config, 0, torch.float64)(tokens, targets), rtol=1e-14, atol=0)


# Its loss.


def test_the_loss_is_the_sum_over_the_tokens_that_count() -> None:
    model, (tokens, targets) = shaken(SMALL), tokens_and_targets(SMALL)
    targets[0, 1:] = IGNORED
    targets[2] = IGNORED
    logits = by_hand(model, tokens).detach()
    want = sum(
        logits[b, t].exp().sum().log() - logits[b, t, targets[b, t]]
        for b in range(3)
        for t in range(SMALL.sequence)
        if targets[b, t] != IGNORED
    )
    assert model(tokens, targets).item() == pytest.approx(float(want), rel=1e-12)


def test_equal_logits_cost_the_logarithm_of_the_vocabulary_and_no_tokens_cost_nothing() -> None:
    model, (tokens, targets) = build(SMALL, 0, torch.float64), tokens_and_targets(SMALL)
    model.head.output.weight.data.zero_()  # type: ignore[union-attr]
    assert model(tokens, targets).item() == pytest.approx(targets.numel() * log(SMALL.vocab), rel=1e-12)
    loss = model(tokens, torch.full_like(targets, IGNORED))
    loss.backward()
    assert loss.item() == 0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_low_precision_logits_are_summed_up_in_float32() -> None:
    model, (tokens, targets) = build(SMALL, 0, torch.bfloat16), tokens_and_targets(SMALL)
    assert model(tokens).dtype == torch.bfloat16
    assert model(tokens, targets).dtype == torch.float32


# Tied embeddings.


def test_tied_embeddings_are_one_parameter_whose_gradient_is_that_of_both_uses() -> None:
    tokens, targets = tokens_and_targets(SMALL)
    tied = build(replace(SMALL, tied=True), 0, torch.float64)
    assert tied.head.output.weight is tied.embedding.word.weight  # type: ignore[union-attr]
    apart = build(SMALL, 0, torch.float64)
    apart.head.output.weight.data.copy_(apart.embedding.word.weight.data)  # type: ignore[union-attr]
    for model in (tied, apart):
        model(tokens, targets).backward()
    both = apart.embedding.word.weight.grad + apart.head.output.weight.grad  # type: ignore[union-attr, operator]
    torch.testing.assert_close(tied.embedding.word.weight.grad, both, rtol=1e-12, atol=1e-14)  # type: ignore[union-attr]


def test_a_stage_with_only_one_of_the_tied_uses_starts_from_the_same_matrix() -> None:
    config = replace(SMALL, tied=True)
    with torch.device("meta"):
        last = GPT(config, range(2, 3), first=False, seed=5)
    weight = materialise(last, 5).head.output.weight  # type: ignore[union-attr]
    assert torch.equal(weight, build(config, 5).embedding.word.weight)  # type: ignore[union-attr]


# Dropout.


def masks(
    samples: list[int], *, seed: int = 0, place: str = "here", split: Split | None = None, width: int = 40
) -> Tensor:
    """1/(1-p) where a value of ones came through, 0 where it was dropped: `[B, 3, width]`."""
    dropout = Dropout(0.25, place, Draw(seed, samples))
    dropout.split = split
    x = torch.ones(len(samples), 3, width, dtype=torch.float64)
    return dropout(split.take(x) if split else x)


def test_a_mask_depends_on_the_seed_the_sample_and_the_place_alone() -> None:
    first = masks([5])[0]
    assert torch.equal(masks([5])[0], first)  # a second time
    assert torch.equal(masks([8, 3, 5])[2], first)  # in another batch, at another row
    assert not torch.equal(masks([6])[0], first)
    assert not torch.equal(masks([5], seed=1)[0], first)
    assert not torch.equal(masks([5], place="there")[0], first)


def test_torchs_own_random_state_neither_matters_nor_moves() -> None:
    torch.manual_seed(0)
    state, first = torch.get_rng_state(), masks([5])
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(masks([5]), first)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_draws_its_piece_of_the_same_mask(size: int) -> None:
    pieces = [masks([5, 9], split=Split(2, rank, size, (40,))) for rank in range(size)]
    assert torch.equal(torch.cat(pieces, 2), masks([5, 9]))


def test_a_quarter_is_dropped_and_the_rest_made_larger_by_as_much() -> None:
    values = masks(list(range(50)), width=100)
    assert set(values.unique().tolist()) == {0.0, 1 / 0.75}
    assert float((values == 0).double().mean()) == pytest.approx(0.25, abs=0.015)
    assert float(values.mean()) == pytest.approx(1.0, abs=0.02)


def test_nothing_is_dropped_when_the_model_is_not_trained_or_the_share_is_zero() -> None:
    x = torch.ones(2, 3)
    assert Dropout(0.5, "here", Draw()).eval()(x) is x
    assert Dropout(0.0, "here", Draw())(x) is x


def test_dropout_asks_for_the_numbers_of_the_samples() -> None:
    with pytest.raises(ValueError, match=r"numbers of the 2 samples: set model\.draw\.samples"):
        Dropout(0.5, "here", Draw())(torch.ones(2, 3))


def test_every_dropout_of_a_model_draws_its_own_mask() -> None:
    places = [m.place for m in build(replace(SMALL, dropout=0.1)).modules() if isinstance(m, Dropout)]
    assert len(places) == 1 + 3 * SMALL.layers and len(set(places)) == len(places)


# What makes no model.


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"layers": 0}, "layers=0 makes no model: choose a whole number from 1"),
        ({"vocab": -3}, "vocab=-3 makes no model"),
        ({"hidden": 10}, "hidden=10 does not divide into 4 heads"),
        ({"kv_heads": 3}, "4 heads cannot share 3 key/value heads: it must divide them"),
        ({"kv_heads": -1}, "4 heads cannot share -1 key/value heads"),
        ({"dropout": 1.0}, r"dropout=1.0 is not a share: choose from 0 up to, not including, 1"),
    ],
)
def test_numbers_that_do_not_fit_are_named(numbers: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(SMALL, **numbers)
