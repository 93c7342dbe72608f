"""Exercise 22. All step, or nobody (25 minutes; lesson 7)

float16 holds nothing below 6e-8 and nothing above 65504. So the loss is multiplied by a scale, which lifts small
gradients into reach, and the optimizer divides by it. If a gradient becomes inf or NaN the scale was too high: the step
is skipped and the scale halved; after `window` good steps in a row it is doubled. But in a 3D run only one rank may see
the inf, in its slice of its stage. If the others step and it does not, the model is torn.

    step          1        2        3              4
    rank 0       ok       ok       ok             ok
    rank 1       ok       ok       inf            ok            one flag over the whole world:
    all         step     step     all skip       step           did anyone see an overflow?
    scale        64       64       64 -> 32       32

    groups.world, groups.dp, groups.pp, groups.tp
    group.all_reduce(tensor, "max")       the maximum over the group, in place; also "sum", "min"
"""

import torch


def step(weight, gradient, scale, good, window, lr, groups):
    """One step of plain gradient descent, w - lr * g, or none.

    weight: float32, this rank's part. gradient: float16, of the same shape: scale times the true gradient, reduced
    already; inf or NaN where it overflowed. scale: a float. good: good steps since the scale last changed.
    Returns (weight, scale, good) for the next step. After a doubling or a halving good is 0.
    """
    raise NotImplementedError
