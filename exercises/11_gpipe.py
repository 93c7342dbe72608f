"""Exercise 11. GPipe (15 minutes; lesson 4)

A model is cut by depth into stages, one on each rank. One batch would keep one rank busy and let the others wait, so it
is cut into micro-batches that follow each other. A schedule is data: for each rank the plain list of what it computes,
in order. Nothing is said about time or messages, for these follow from who needs what. GPipe is the simplest schedule:
all forwards first, then all backwards.

    3 stages, 4 micro-batches, the dots are waiting (they follow from the order, and are not written):

    rank 0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
    rank 1   .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
    rank 2   .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

    F2 on rank 1 needs F2 of rank 0;  B2 on rank 1 needs B2 of rank 2.

    Nothing is called: no ranks are needed to write down what ranks shall do.
"""


def gpipe(stages, micro_batches):
    """What each rank does, in order.

    stages and micro_batches: whole numbers from 1. Returns a list with one list for each rank, of texts such as "F0"
    (forward of micro-batch 0) and "B3" (backward of micro-batch 3).
    """
    raise NotImplementedError
