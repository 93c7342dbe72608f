"""Exercise 19. ZeRO stage 3: share the parameters (40 minutes; lesson 5)

Now a rank keeps a piece of every layer's weight, and nothing else. Before a layer computes, its weight is gathered from
all ranks; after that it is freed. Backward needs it once more, gathers it once more, and reduces the gradient that it
makes to pieces again. At any time a rank holds one whole layer, or two if it fetches the next one ahead.

    forward       gather 0, compute 0, free     gather 1, compute 1, free     gather 2, compute 2, free
    backward      gather 2, compute 2, free, reduce_scatter 2     gather 1, compute 1, free, reduce_scatter 1     ...

A tensor is freed when no name, list or view holds it any more. Inputs of layers are kept for the backward; weights not.

    group.rank, group.size
    group.all_gather(tensor)          every rank's tensor, one after the other along dimension 0
    group.reduce_scatter(tensor)      the sum over ranks, of which this rank gets its piece of dimension 0
"""

import torch


def zero3(pieces, shapes, x, upstream, forward, backward, group):
    """Forward and backward through all layers, on this rank's rows.

    pieces: by layer, this rank's piece of the weight, flattened and padded with zeros to divide by group.size.
    shapes: by layer, the weight's shape. x: this rank's input of the first layer.
    forward(weight, x) computes a layer's output y; backward(weight, x, dy) computes (dx, dweight).
    upstream: the gradient of the loss with respect to the last output.
    Returns (the last output, by layer this rank's piece of the gradient summed over ranks, padded likewise).
    """
    raise NotImplementedError
