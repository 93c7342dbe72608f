"""Exercise 15. An executor for pipelines (30 minutes; lesson 4)

A schedule says what a rank computes, in which order, and nothing about messages. They follow: a forward needs the
activations that the stage before has sent, and a backward the gradient that the stage after has sent. So one short loop
runs every schedule, GPipe, 1F1B or one that nobody has thought of yet. It must not stand still with any.

    rank r of p          the action        before it              computes             after it
                         F3                receives from r - 1    forward(3, x)        sends y to r + 1
                         B3                receives from r + 1    backward(3, grad)    sends grad_x to r - 1

    The first rank receives no activations, the last rank no gradients: they get None.
    The first rank sends no gradients, the last rank no activations.

    In 1F1B two neighbours often send to each other at the same moment:

    rank 1   ... F2, its result to rank 2 ...         Whoever blocks in send until the other receives waits for ever,
    rank 2   ... B0, its result to rank 1 ...         for the other blocks as well.

    group.rank, group.size
    pending = group.send(tensor, to, async_op=True) ; pending.wait()     the tensor must stay as it is until then
    group.recv(tensor, source)                                           blocks; into `tensor`, in place
"""

import torch


def execute(actions, forward, backward, like, group):
    """Run this rank's actions, in their order.

    actions: texts such as "F0" and "B3", those of this rank. forward(micro_batch, x) returns the activations that leave
    the stage; backward(micro_batch, grad) returns the gradient of what came in. like: a tensor with the shape and dtype
    of every message, activations or gradients. Returns nothing.
    """
    raise NotImplementedError
