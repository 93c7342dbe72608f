"""Exercise 23. Compute it again (30 minutes; lesson 7)

Autograd keeps what the backward of each operation needs. In a deep model that is most of the memory. A checkpointed
function keeps its inputs only. Its forward runs without a graph; in backward it runs once more, with a graph, which is
walked at once and dropped. One third more computing, and memory for one segment instead of all.

    usual           x -> [ a, b, c kept ] -> h -> [ a, b, c kept ] -> y
    checkpointed    x -> [              ] -> h -> [              ] -> y         x and h are kept
    backward                                      [ a, b, c again ], its gradients, dropped
                         [ a, b, c again ], its gradients, dropped

If the function draws random numbers, as dropout does, the second run must draw the same ones: else gradients belong to
another forward. And afterwards the generator must stand where it stood, as if nothing had been drawn.

    torch.get_rng_state(), torch.set_rng_state(state)
    torch.autograd.Function, torch.enable_grad(), torch.autograd.backward(tensors, gradients)
    torch.utils.checkpoint is what you write here: it may not be called
"""

import torch


def checkpoint(function, *inputs):
    """function(*inputs), a tensor, of which only the inputs are kept for the backward.

    inputs: tensors of which at least one requires a gradient. The function may also use weights that are not among its
    inputs: their gradients are added to their .grad as usual.
    """
    raise NotImplementedError
