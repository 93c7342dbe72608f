"""A solution of exercise 19."""

import math

import torch


def zero3(pieces, shapes, x, upstream, forward, backward, group):
    gather = lambda n: group.all_gather(pieces[n])[: math.prod(shapes[n])].view(shapes[n])
    xs = [x]
    for n in range(len(pieces)):
        xs.append(forward(gather(n), xs[-1]))
    dy, gradients = upstream, {}
    for n in reversed(range(len(pieces))):
        dy, dweight = backward(gather(n), xs[n], dy)
        padded = torch.nn.functional.pad(dweight.flatten(), (0, -dweight.numel() % group.size))
        gradients[n] = group.reduce_scatter(padded)
    return xs[-1], [gradients[n] for n in range(len(pieces))]
