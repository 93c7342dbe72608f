"""Exercise 21. The norm of a gradient that nobody has whole (20 minutes; lesson 6)

Gradients are clipped by their norm: the root of the sum of all squares of all parameters. In a 3D run no rank has them
all. Stages of the pipeline have different layers; ranks of tp have different slices of a matrix, but the same biases
and layer norms; replicas (dp) have equal gradients, which were averaged before. Each number of the model counts once.

    tp 2, one stage          rank 0              rank 1
    matrix, cut              w[0:4]              w[4:8]           counts on both
    layer norm, whole        g                   g  (the same)    counts on one of them

    groups.dp, groups.pp, groups.tp         each with .rank and .size
    group.all_reduce(tensor)                the sum over the group, in place
"""

import torch


def gradient_norm(gradients, cut, groups):
    """The norm of the whole model's gradient.

    gradients: tensors of any shapes, of this rank's parameters; dp ranks have equal ones already.
    cut: as many booleans: True if tensor parallel has cut the parameter, False if each tp rank has it whole.
    Returns a tensor with one number (shape []), the same on all ranks.
    """
    raise NotImplementedError
