"""Exercise 10. Sequence parallel (25 minutes; lesson 3)

Between the split layers of tensor parallelism every rank holds the whole activation, to do the same with it: norm,
dropout, addition. Sequence parallel lets each rank hold only its slice of the sequence there. The all_reduce behind a
pair of split layers becomes a reduce_scatter, and an all_gather stands in front of the next pair: together the same
bytes, for an all_reduce in a ring is just these two.

           [B, T/n, D]          [B, T, D]                      [B, T, D]           [B, T/n, D]
            its slice   enter   the whole     split layers    partial sums  leave   its slice of
           ----------->------->----------->  columns, rows  -------------->------->   the sum

    forward             all_gather                                          reduce_scatter
    backward            the other way round: what is gathered forward is, backward, a sum that is scattered

    Collectives work along dimension 0; the sequence is dimension 1: swap the two before and after.

        group.all_gather(tensor)            every rank's tensor, one after the other along dimension 0
        group.reduce_scatter(tensor)        the sum over the ranks, of which each gets its share of dimension 0
        tensor.transpose(0, 1).contiguous()

    autograd does not see messages. A function of your own says what happens backward:

        class Name(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, group):         ctx.group = group keeps it for backward
            @staticmethod
            def backward(ctx, grad):            returns the gradient of x, and None for group
        Name.apply(x, group)
"""

import torch


def enter(x, group):
    """The whole sequence from the slices of all ranks, with a backward that is right.

    x: [B, T/n, D], slice `group.rank` of the sequence. Returns [B, T, D]. Each rank's gradient of it is a part of the
    gradient, and the parts are to be added up.
    """
    raise NotImplementedError


def leave(x, group):
    """This rank's slice of the sum over the ranks, with a backward that is right.

    x: [B, T, D], a partial sum. Returns [B, T/n, D], slice `group.rank` of the sequence.
    """
    raise NotImplementedError
