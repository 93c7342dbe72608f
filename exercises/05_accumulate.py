"""Exercise 5. Accumulate, then synchronise once (25 minutes; lesson 2)

A rank's part of the batch does not fit into memory at once: its activations are too many. So it is cut into
micro-batches, which go forward and backward one after the other, and their gradients add up in `.grad`. Messages cost
the same for a micro-batch as for a batch, so they are sent once, when all of them are done.

    rank 0     F0 B0 | F1 B1 | F2 B2 |  all_reduce   step
    rank 1     F0 B0 | F1 B1 | F2 B2 |  all_reduce   step
                                        ^ the only messages

    group.rank, group.size
    group.all_reduce(tensor)         adds up over the ranks, in place; "mean", "max", "min" as second argument
"""

import torch


def accumulate(micro_batches, loss_of, parameters, group):
    """Leave in each parameter's `.grad` the gradient of the mean loss over all micro-batches of all ranks.

    micro_batches: a list, as long on every rank. loss_of(micro_batch): its mean loss, a tensor of one number, with
    which autograd can go backward; all micro-batches are of the same size. parameters: a list of tensors; their `.grad`
    is that of the step before, and is not wanted any more. Returns nothing.
    """
    raise NotImplementedError
