"""Exercise 7. A linear layer cut by rows (30 minutes; lesson 3)

The layer after one that was cut by columns: its inputs lie in slices on the ranks already. Each rank multiplies its
slice of the inputs with its slice of the matrix, and gets something of the full size, but only a part of the sum. The
parts are added up, once. On the way back every rank has the whole gradient of the outputs, and that is all it needs.

                forward                            backward
    rank 0      x0 W0^T  |                         dx0 = dy W0
    rank 1      x1 W1^T  |  y = sum + bias         dx1 = dy W1

So after the layer there is an operation g, the mirror of f: an all_reduce forward, and nothing backward. It has to be
a `torch.autograd.Function` of your own. The bias belongs to the whole sum. All ranks have a copy of it, and copies have
to stay the same: each rank needs the bias' gradient.

    group.rank, group.size
    group.all_reduce(tensor)         adds up over the ranks, in place, and returns the tensor
"""

import torch
import torch.nn.functional as F


def cut(weight, group):
    """This rank's slice of a whole layer's weight [D, F], for its slice of the inputs: [D, F / group.size].

    Rank 0 has the first inputs, rank 1 the next, and so on; F is a multiple of group.size.
    """
    raise NotImplementedError


def row_linear(x, weight, bias, group):
    """The whole layer's outputs.

    x: [B, T, F / group.size], this rank's slice of the inputs. weight: [D, F / group.size], a slice as from `cut`.
    bias: [D], the same on all ranks. Returns [B, T, D], the same on all ranks. After a backward, for which all ranks
    have the same gradient of the outputs, x.grad and weight.grad are those of this rank's slices, and bias.grad is the
    same on all ranks.
    """
    raise NotImplementedError
