"""Taking pieces and joining them is lossless for any blocks, padding and number of ranks, and keeps heads together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from minipar.split import Split, split_of


def whole_of(blocks: tuple[int, ...], dim: int, dims: int) -> Tensor:
    """A tensor of `dims` dimensions, `blocks` along `dim`, every value different and none zero."""
    shape = [2 + d for d in range(dims)]
    shape[dim] = sum(blocks)
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


@st.composite
def splits(draw: Any) -> tuple[tuple[int, ...], int, int]:
    """Blocks, a dimension, and how many there are."""
    dims = draw(st.integers(1, 3))
    return tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3))), draw(st.integers(0, dims - 1)), dims


def pieces_of(whole: Tensor, dim: int, size: int, blocks: tuple[int, ...]) -> list[Tensor]:
    return [Split(dim, rank, size, blocks).take(whole) for rank in range(size)]


@settings(deadline=None)
@given(splits(), st.integers(1, 5))
def test_joining_the_pieces_of_all_ranks_gives_the_whole(cut: tuple[tuple[int, ...], int, int], size: int) -> None:
    blocks, dim, dims = cut
    whole = whole_of(blocks, dim, dims)
    pieces = pieces_of(whole, dim, size, blocks)
    assert torch.equal(Split(dim, 0, size, blocks).join(pieces), whole)
    assert len({piece.shape for piece in pieces}) == 1
    assert pieces[0].shape[dim] == sum(Split(dim, 0, size, blocks).shares)
    assert Split(dim, 0, size, blocks).whole_shape(pieces[0].shape) == tuple(whole.shape)


@settings(deadline=None)
@given(splits(), st.integers(1, 5))
def test_each_value_is_on_exactly_one_rank_and_the_rest_is_zeros(
    cut: tuple[tuple[int, ...], int, int], size: int
) -> None:
    blocks, dim, dims = cut
    whole = whole_of(blocks, dim, dims)
    held = torch.cat([piece.flatten() for piece in pieces_of(whole, dim, size, blocks)])
    assert torch.equal(held[held != 0].sort().values, whole.flatten())
    padding = sum(-(-block // size) * size - block for block in blocks) * whole.numel() // sum(blocks)
    assert int((held == 0).sum()) == padding


@settings(deadline=None)
@given(splits(), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_resharding_over_any_sizes_ends_with_what_it_began_with(
    cut: tuple[tuple[int, ...], int, int], sizes: list[int]
) -> None:
    blocks, dim, dims = cut
    original = whole = whole_of(blocks, dim, dims)
    for size in [2, 4, 1, *sizes]:
        whole = Split(dim, 0, size, blocks).join(pieces_of(whole, dim, size, blocks))
    assert torch.equal(whole, original)


@settings(deadline=None)
@given(splits(), st.integers(1, 4))
def test_the_piece_of_another_rank_is_the_one_that_it_would_take_itself(
    cut: tuple[tuple[int, ...], int, int], size: int
) -> None:
    blocks, dim, dims = cut
    whole = whole_of(blocks, dim, dims)
    for rank, piece in enumerate(pieces_of(whole, dim, size, blocks)):
        assert torch.equal(Split(dim, 0, size, blocks).take(whole, rank), piece)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 2), (8, 2, 2), (8, 4, 4), (6, 3, 3), (4, 1, 1)])
def test_each_rank_takes_whole_heads_and_the_keys_and_values_that_its_queries_use(
    heads: int, kv_heads: int, size: int
) -> None:
    head_size = 3
    names = [f"{what}{n}" for what, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)) for n in range(count)]
    rows = torch.arange(len(names)).repeat_interleave(head_size)  # row -> the number of its name
    split = tuple(count * head_size for count in (heads, kv_heads, kv_heads))
    for rank in range(size):
        taken = Split(0, rank, size, split).take(rows)
        assert torch.equal(taken[::head_size].repeat_interleave(head_size), taken)  # heads are not torn
        got = [names[int(number)] for number in taken[::head_size]]
        queries = range(rank * heads // size, (rank + 1) * heads // size)
        used = sorted({query // (heads // kv_heads) for query in queries})
        assert got == [f"q{n}" for n in queries] + [f"k{n}" for n in used] + [f"v{n}" for n in used]


def test_fused_query_key_value_with_grouped_heads_survives_2_then_4_then_1_ranks() -> None:
    blocks = (8 * 3, 4 * 3, 4 * 3)
    original = torch.randn(sum(blocks), 5, generator=torch.Generator().manual_seed(0))
    two = pieces_of(original, 0, 2, blocks)
    four = pieces_of(Split(0, 0, 2, blocks).join(two), 0, 4, blocks)
    assert torch.equal(Split(0, 0, 4, blocks).join(four), original)
    assert not torch.equal(torch.cat(four), original)  # laying pieces end to end mixes queries, keys and values


def test_the_picture_of_the_module_is_true() -> None:
    rows = ["q0", "q1", "k0", "k1", "v0", "v1"]
    for rank, want in ((0, ["q0", "k0", "v0"]), (1, ["q1", "k1", "v1"])):
        assert [rows[int(i)] for i in Split(0, rank, 2, (2, 2, 2)).take(torch.arange(6))] == want


def test_eleven_words_over_four_ranks_are_three_each_and_one_of_padding() -> None:
    pieces = pieces_of(torch.arange(1.0, 12.0), 0, 4, (11,))
    assert [piece.tolist() for piece in pieces] == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 0]]


def test_five_words_over_four_ranks_leave_the_last_rank_only_padding() -> None:
    pieces = pieces_of(torch.arange(1.0, 6.0), 0, 4, (5,))
    assert [piece.tolist() for piece in pieces] == [[1, 2], [3, 4], [5, 0], [0, 0]]


def test_a_piece_is_a_copy_even_when_there_is_one_rank() -> None:
    whole = torch.ones(2, 3)
    Split(1, 0, 2, (3,)).take(whole).zero_()
    assert torch.equal(whole, torch.ones(2, 3))


def test_a_parameter_says_how_it_is_cut_or_that_it_is_not() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert split_of(parameter) is None
    parameter.tp_split = Split(0, 1, 2, (4,))  # type: ignore[attr-defined]
    assert split_of(parameter) == Split(0, 1, 2, (4,))
