"""Exercise 18. ZeRO stage 2: share the gradients (25 minutes; lesson 5)

A rank that updates a piece of each layer needs the summed gradient of that piece only. So reduce a layer's gradient as
soon as backward has made it, keep your piece, and let the rest go. Then no rank ever holds all gradients at once. There
is a price: with several micro-batches there is no place to add whole gradients up, so each micro-batch is reduced.

    backward makes     layer 3        layer 2        layer 1        layer 0        layer 3 of the next micro-batch
    reduce_scatter          piece 3        piece 2        piece 1        piece 0        added to piece 3
    whole gradients    #              #              #              #              #             at most one or two

    group.rank, group.size
    group.reduce_scatter(tensor)      the sum over ranks, of which this rank gets its piece of dimension 0; with
                                      async_op=True it returns at once, and .wait() gives the piece
"""

import torch


def reduce_as_they_come(gradients, layers, group):
    """This rank's pieces of the summed gradients.

    gradients: an iterator of (layer, gradient), for each micro-batch from the last layer to the first. A gradient has
    any shape, is this rank's, and is made when you ask for the next. Losses are divided by the tokens of the whole
    batch, so gradients are summed, over ranks and micro-batches.
    layers: how many there are. Returns a list by layer: piece `group.rank` of the summed gradient, flattened and padded
    with zeros to divide by group.size.
    """
    raise NotImplementedError
