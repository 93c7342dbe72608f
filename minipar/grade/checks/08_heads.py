"""Exercise 8: attention, whose heads are cut over tensor-parallel ranks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minipar.grade.judging import Case, Draw, Judge, Outcome, calls_of

TITLE, MINUTES, LESSON = "Attention, cut by heads", 40, 3
HEADS, VALUE, MESSAGES = "heads_of: which heads a rank computes", "attention: the output of all heads", "one all_reduce"
CHECKS = {HEADS: 3, VALUE: 4, MESSAGES: 3}
HINTS = [
    "heads_of: heads // group.size query heads lie together on each rank; heads // kv_heads query heads share a "
    "key/value head. Which one does query head h use?",
    "Query head h uses key/value head h // (heads // kv_heads). Collect these for the rank's query heads, each once.",
    "attention: F.linear(x, wq) is [B, T, q d]; make it [B, q, T, d] with unflatten and transpose, and the same for "
    "keys and values.",
    "wk has only this rank's key/value heads: the place of a head in there is its place in the list of heads_of. With "
    "a list `of` of these places, one for each query head, k[:, of] has as many heads as q.",
    "F.scaled_dot_product_attention(q, k, v, is_causal=True); back to [B, T, q d]; F.linear with wo; all_reduce.",
]


def harness(student, group, sizes=None, **inputs):  # type: ignore[no-untyped-def]
    if sizes is None:
        try:
            return student.attention(*inputs.values(), group)
        except NotImplementedError:
            return None
    found = [student.heads_of(heads, kv_heads, group) for heads, kv_heads in sizes]
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in found):
        raise TypeError("heads_of has to return two lists: query heads, and key/value heads")
    return [[[int(head) for head in some] for some in pair] for pair in found]


def cases(draw: Draw) -> list[Case]:
    sizes = [(8, 2), (4, 1), (4 * draw.integer(1, 2), 4), (12, 3)]
    more = draw.choice([(4, 8, 2), (4, 4, 1), (4, 12, 3), (5, 5, 1)])
    return [Case([{"sizes": sizes}] * 4, about="4 ranks"), _case(draw, 3, 12, 4), _case(draw, *more)]


def _case(draw: Draw, size: int, heads: int, kv_heads: int) -> Case:
    D, d, T = draw.integer(5, 7), draw.integer(2, 3), draw.integer(3, 4)
    x = draw.normal(2, T, D)
    wq, wo = draw.normal(heads, d, D), draw.normal(D, heads, d)
    wk, wv = draw.normal(kv_heads, d, D), draw.normal(kv_heads, d, D)
    inputs = []
    for rank in range(size):
        mine, served = _heads_of(rank, size, heads, kv_heads)
        slices = {"wq": wq[mine], "wk": wk[served], "wv": wv[served]}
        rows = {name: some.flatten(0, 1) for name, some in slices.items()}
        inputs.append({"x": x, **rows, "wo": wo[:, mine].flatten(1), "heads": heads, "kv_heads": kv_heads})
    return Case(inputs, about=f"{size} ranks, {heads} query heads, {kv_heads} key/value heads")


def _heads_of(rank: int, size: int, heads: int, kv_heads: int) -> tuple[list[int], list[int]]:
    """The query heads of a rank, and the key/value heads that serve them."""
    mine = [head for head in range(heads) if head * size // heads == rank]
    return mine, [head for head in range(kv_heads) if any(query * kv_heads // heads == head for query in mine)]


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    if "sizes" in case.inputs[0]:
        _judge_heads(case, outcome, judge)
    else:
        _judge_attention(case, outcome, judge)


def _judge_heads(case: Case, outcome: Outcome, judge: Judge) -> None:
    size, sizes = case.size, case.inputs[0]["sizes"]

    def by_rank(of: Callable[[int, int, int], Sequence[Sequence[int]]]) -> list[list[list[list[int]]]]:
        return [[[list(some) for some in of(rank, *one)] for one in sizes] for rank in range(size)]

    def mine(rank: int, heads: int) -> range:
        return range(rank * heads // size, (rank + 1) * heads // size)

    def served(some: Sequence[int], heads: int, kv_heads: int) -> list[int]:
        return sorted({head // (heads // kv_heads) for head in some})

    judge.equal(
        HEADS,
        outcome.values,
        by_rank(lambda r, q, kv: _heads_of(r, size, q, kv)),
        {
            "rank r takes every N-th query head, beginning with r: take heads that lie together, for neighbours share "
            "a key/value head": by_rank(lambda r, q, kv: (range(r, q, size), served(range(r, q, size), q, kv))),
            "every rank takes all key/value heads: it needs those of its own query heads only": by_rank(
                lambda r, q, kv: (mine(r, q), range(kv))
            ),
            "key/value heads are named once for each query head: name each once": by_rank(
                lambda r, q, kv: (mine(r, q), [head // (q // kv) for head in mine(r, q)])
            ),
            "query head h is served by h mod kv_heads: with grouped queries neighbours share, so it is "
            "h // (heads // kv_heads)": by_rank(
                lambda r, q, kv: (mine(r, q), sorted({head % kv for head in mine(r, q)}))
            ),
            "key/value heads are dealt out, kv_heads // group.size to a rank: a rank needs those of its query heads, "
            "and where there are fewer than ranks, several ranks need the same": by_rank(
                lambda r, q, kv: (mine(r, q), range(r * (kv // size), (r + 1) * (kv // size)))
            ),
            "the key/value heads are numbered from 0 on each rank: number them as in the whole model": by_rank(
                lambda r, q, kv: (mine(r, q), range(len(served(mine(r, q), q, kv))))
            ),
            "the query heads are numbered from 0 on each rank: number them as in the whole model": by_rank(
                lambda r, q, kv: (range(q // size), served(mine(r, q), q, kv))
            ),
        },
        what=f"what heads_of returns for {', '.join(f'{q} heads with {kv} key/value heads' for q, kv in sizes)}",
    )


def _judge_attention(case: Case, outcome: Outcome, judge: Judge) -> None:
    size, values = case.size, outcome.values
    x, heads, kv_heads = (case.inputs[0][name] for name in ("x", "heads", "kv_heads"))
    lists = [_heads_of(rank, size, heads, kv_heads) for rank in range(size)]
    share, queries = heads // size, heads // kv_heads

    def right(head: int, mine: Sequence[int], served: Sequence[int]) -> int:
        return served.index(mine[head] // queries)

    def parts(of: Callable[[int, Sequence[int], Sequence[int]], int], **how: Any) -> list[Tensor]:
        places = [[of(head, *pair) for head in range(share)] for pair in lists]
        return [_part(inputs, some, **how) for inputs, some in zip(case.inputs, places, strict=True)]

    def total(some: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack(list(some)).sum(0)] * size

    own = parts(right)
    judge.equal(
        VALUE,
        values,
        total(own),
        {
            "attention is not written yet": [None] * size,
            "each rank returns its own part of the sum: an all_reduce has to add the parts up": own,
            f"the parts are averaged over the {size} ranks: the output projection adds up over heads, so add them up": [
                one / size for one in total(own)
            ],
            "a query sees what comes after it: attention has to be causal": total(parts(right, causal=False)),
            "the scores are not divided by the square root of d": total(parts(right, scaled=False)),
            "key/value heads are repeated in turn (0 1 0 1), but neighbouring query heads share one (0 0 1 1)": total(
                parts(lambda head, mine, served: head % len(served))
            ),
            "each key/value head of the rank is repeated equally often, but a rank may have only a part of the query "
            "heads of one: look up the place of h // (heads // kv_heads) for each query head h": total(
                parts(lambda head, mine, served: head * len(served) // share)
            ),
            "all query heads of a rank use its first key/value head: look up the place of each one's": total(
                parts(lambda head, mine, served: 0)
            ),
        },
        what="the output",
    )
    for rank in range(size):
        calls = calls_of(outcome, rank)
        made = ", ".join(map(str, calls)) or "nothing"
        judge.that(
            MESSAGES,
            [(call.op, call.bytes) for call in calls] == [("all_reduce", x.nbytes)],
            f"rank {rank} calls {made}; one all_reduce of the outputs, {x.nbytes} bytes, is all that is needed: heads "
            "and weights stay on their rank",
        )


def _part(inputs: Mapping[str, Any], of: Sequence[int], causal: bool = True, scaled: bool = True) -> Tensor:
    """A rank's part of the output, where its query head h uses its key/value head of[h]."""
    x, d = inputs["x"], inputs["wq"].shape[0] // len(of)
    q, k, v = ((x @ inputs[name].t()).unflatten(-1, (-1, d)).transpose(1, 2) for name in ("wq", "wk", "wv"))
    scores = q @ k[:, list(of)].transpose(-2, -1) / (d**0.5 if scaled else 1)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    mixed = scores.softmax(-1) @ v[:, list(of)]
    return mixed.transpose(1, 2).flatten(2) @ inputs["wo"].t()
