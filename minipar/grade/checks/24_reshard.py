"""Exercise 24: pieces that were saved by some ranks, loaded by another number of ranks."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minipar.grade.judging import Case, Draw, Judge, Outcome, calls_of

TITLE, MINUTES, LESSON = "Cut for four, needed for six", 20, 6
CHECKS = {"each rank has its new piece": 5, "no file is read without need": 3, "no messages": 1}
HINTS = [
    "Take one block alone at first. From where to where in the whole block does this rank's new piece go?",
    "The new piece of a block of n goes from rank * n / size to (rank + 1) * n / size; file f has f * n / saved to "
    "(f + 1) * n / saved. Read a file only if these overlap.",
    "Which files overlap is the same for all blocks: read those, each once. In a file, a block begins where the shares "
    "of the blocks before it end.",
    "For each block: torch.cat its shares in the files that you have read, and narrow that to the new piece, whose "
    "start counts from the first of these files. Then torch.cat the blocks along dim.",
]


def harness(student, group, files, dim, blocks):  # type: ignore[no-untyped-def]
    reads = []

    def read(number):
        reads.append(int(number))
        return files[number].clone()

    return {"piece": student.load_piece(read, len(files), dim, blocks, group), "reads": reads}


def cases(draw: Draw) -> list[Case]:
    some = []
    for saved, size, count in ((2, 3, 1), (4, 6, 3), (draw.choice([3, 5]), 2, 3), (2, 4, draw.integer(2, 3))):
        dim, unit = draw.integer(0, 1), math.lcm(saved, size)
        blocks = [unit * draw.integer(1, 2) for _ in range(count)]
        shape = [draw.integer(2, 4)] * 2
        shape[dim] = sum(blocks)
        whole = draw.normal(*shape)
        files = [_cut(whole, dim, blocks, number, saved) for number in range(saved)]
        about = f"{saved} files for {size} ranks, cut in dimension {dim}, {count} block{'s' * (count > 1)}"
        some.append(Case([{"files": files, "dim": dim, "blocks": blocks}] * size, about=about))
    return some


def judge(case: Case, outcome: Outcome, judge: Judge) -> None:
    size, (files, dim, blocks) = case.size, (case.inputs[0][name] for name in ("files", "dim", "blocks"))
    saved, ranks = len(files), range(case.size)
    shares = [block // saved for block in blocks]
    parts = zip(*(file.split(shares, dim) for file in files), strict=True)
    whole, glued = torch.cat([torch.cat(part, dim) for part in parts], dim), torch.cat(files, dim)
    right = [_cut(whole, dim, blocks, rank, size) for rank in ranks]
    judge.equal(
        "each rank has its new piece",
        [one["piece"] for one in outcome.values],
        right,
        {
            "the files were joined end to end and cut anew: with several blocks each file has a share of each, so cut "
            "block by block": [glued.chunk(size, dim)[rank] for rank in ranks],
            "the whole was put together rightly, and then cut in one: each block is cut by itself": [
                whole.chunk(size, dim)[rank] for rank in ranks
            ],
            "the files were joined as if they were whole: in a file the blocks have their shares one after the other": [
                _cut(glued, dim, blocks, rank, size) for rank in ranks
            ],
            "this is the old piece of the same number: the new pieces have another length": [
                files[rank % saved] for rank in ranks
            ],
            "this is the whole weight: take this rank's piece of it": [whole] * size,
            "this is what the files hold that were read: cut it to this rank's piece": [
                torch.cat([files[n] for n in _needed(rank, size, saved)], dim) for rank in ranks
            ],
            "the blocks are right, each, but the last one is missing": [
                piece.narrow(dim, 0, piece.shape[dim] - blocks[-1] // size) for piece in right
            ],
        },
        what=f"the piece ({case.about})",
    )
    _judge_reads(size, saved, outcome, judge)


def _judge_reads(size: int, saved: int, outcome: Outcome, judge: Judge) -> None:
    for rank in range(size):
        reads, needed = outcome.values[rank]["reads"], _needed(rank, size, saved)
        spare = sorted(set(reads) - set(needed))
        judge.that(
            "no file is read without need",
            not spare and len(reads) <= len(needed),
            f"rank {rank} of {size} reads file {', '.join(map(str, spare))} as well, of which it needs nothing: its "
            f"piece lies in file {', '.join(map(str, needed))}"
            if spare
            else f"rank {rank} reads {len(reads)} times, but has {len(needed)} files to read: read each once, for all "
            "blocks",
        )
        calls = calls_of(outcome, rank)
        judge.that("no messages", not calls, f"rank {rank} calls {calls[0]}: each reads its own" if calls else "")


def _cut(whole: Tensor, dim: int, blocks: Sequence[int], rank: int, size: int) -> Tensor:
    """A rank's share of each block."""
    return torch.cat([block.chunk(size, dim)[rank] for block in whole.split(list(blocks), dim)], dim)


def _needed(rank: int, size: int, saved: int) -> list[int]:
    """The files that overlap with a rank's piece."""
    return list(range(rank * saved // size, -(-(rank + 1) * saved // size)))
