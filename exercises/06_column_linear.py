"""Exercise 6. A linear layer cut by columns (30 minutes; lesson 3)

Tensor parallel: the ranks compute each layer together. All have the whole input x, and each computes a slice of the
outputs, for which it needs only its slice of the matrix. No message is needed on the way forward. On the way back each
rank finds what its slice of the outputs does to x, and the gradient of x is the sum of all that.

                forward               backward
    rank 0      y0 = x W0^T + b0      dy0 W0  |
    rank 1      y1 = x W1^T + b1      dy1 W1  |  dx = dy0 W0 + dy1 W1, on both

So between x and the layer there is an operation f, which is nothing forward and an all_reduce backward. Autograd does
not see messages: f has to be a `torch.autograd.Function` of your own. Mind that torch keeps a matrix as [out, in]: what
books call the columns of the matrix, one for each output, are rows there.

    group.rank, group.size
    group.all_reduce(tensor)         adds up over the ranks, in place, and returns the tensor
"""

import torch
import torch.nn.functional as F


def cut(weight, bias, group):
    """This rank's slice of a whole layer's weight [F, D] and bias [F]: [F / group.size, D] and [F / group.size].

    Rank 0 has the first outputs, rank 1 the next, and so on; F is a multiple of group.size.
    """
    raise NotImplementedError


def column_linear(x, weight, bias, group):
    """This rank's slice of the outputs.

    x: [B, T, D], the same on all ranks. weight: [F / group.size, D] and bias: [F / group.size], slices as from `cut`.
    Returns [B, T, F / group.size]. After a backward, x.grad is the whole gradient, the same on all ranks, and the
    gradients of weight and bias are those of this rank's slices.
    """
    raise NotImplementedError
