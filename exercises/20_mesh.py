"""Exercise 20. Ranks in a box (10 minutes; lesson 6)

Ranks have numbers, but a run in three dimensions needs places: which replica (dp), which stage of the pipeline (pp),
which slice of a layer (tp). Tensor parallel talks most, so its ranks shall be neighbours, in one machine; data parallel
talks least, so its groups may reach furthest. That is an order of counting: tp runs fastest, then pp, then dp.

    dp 2, pp 2, tp 3                tp 0   tp 1   tp 2
    dp 0   pp 0               rank    0      1      2         groups of rank 4, at (0, 1, 1):
           pp 1                       3      4      5             tp   3 4 5      differ in tp alone
    dp 1   pp 0                       6      7      8             pp   1 4        differ in pp alone
           pp 1                       9     10     11             dp   4 10       differ in dp alone

No messages are needed: every rank can work this out for all ranks, and all must come to the same result.
"""


def coordinates(rank, dp, pp, tp):
    """Where a rank stands.

    rank: 0 to dp * pp * tp - 1; dp, pp, tp: how many places along each axis. Returns (dp, pp, tp), three whole numbers
    from 0.
    """
    raise NotImplementedError


def groups(rank, dp, pp, tp):
    """The three groups that a rank belongs to, itself included.

    Returns {"dp": [...], "pp": [...], "tp": [...]}: world ranks, smallest first; those of an axis differ from `rank` in
    that coordinate at most.
    """
    raise NotImplementedError
