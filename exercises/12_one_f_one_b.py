"""Exercise 12. 1F1B (25 minutes; lesson 4)

GPipe keeps the activations of all micro-batches, for nothing is freed before the first backward. But a backward frees
what its forward has left. So begin with the backwards as early as they can be had: after a short warm-up each rank
takes one forward and one backward in turn, and at the end the backwards that are left. This does not make the bubble
smaller; it makes what is held depend on the number of stages, however many micro-batches there are.

    3 stages, 4 micro-batches, the dots are waiting (not written):

    rank 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3        holds at most 3
    rank 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .         holds at most 2
    rank 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .         holds at most 1
             warm-up, then B and F in turn, then drain

    Nothing is called: no ranks are needed to write down what ranks shall do.
"""


def one_f_one_b(stages, micro_batches):
    """What each rank does, in order.

    stages and micro_batches: whole numbers from 1; there may be fewer micro-batches than stages. Returns a list with
    one list for each rank, of texts such as "F0" (forward of micro-batch 0) and "B3" (backward of micro-batch 3).
    """
    raise NotImplementedError
