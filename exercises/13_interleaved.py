"""Exercise 13. Interleaved 1F1B (40 minutes; lesson 4)

The bubble of 1F1B is p - 1 forwards and backwards of a stage. With thinner stages it is shorter: give each rank some of
them, its chunks. Rank r holds stages r, p + r, 2p + r, ... of p * chunks, and each micro-batch goes round all ranks
`chunks` times. The pipeline fills in smaller steps, the bubble is divided by `chunks`, and more messages are sent.
Megatron-LM trains like that.

    2 ranks, 2 chunks, 4 micro-batches. F1.0 is the forward of micro-batch 1 on the rank's chunk 0. Dots are waiting.

    rank 0  F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 .    B2.1 .    B3.1 B2.0 B3.0
    rank 1  .    F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0 .

    Forwards:   in rounds of p micro-batches. A round goes through the rank's first chunk, then through the next, ...
    Backwards:  in the same rounds, from the rank's last chunk to its first.
    Together:   as in 1F1B. Some forwards to warm up; then one forward and one backward in turn; then the backwards that
                are left. Only the warm-up is longer: until the rank's last chunk has been reached, and for each rank
                behind it two more. One is needed until the gradient is back; the other is work for the time in which
                messages are on their way.

    Nothing is called: no ranks are needed to write down what ranks shall do.
"""


def interleaved(ranks, micro_batches, chunks):
    """What each rank does, in order.

    ranks: p; micro_batches: a multiple of p; chunks: stages on each rank, from 2. Returns a list with one list for each
    rank, of texts such as "F0.1" (forward of micro-batch 0 on the rank's chunk 1) and "B3.0".
    """
    raise NotImplementedError
