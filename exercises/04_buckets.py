"""Exercise 4. Gradients in buckets (40 minutes; lesson 2)

One message for each gradient is slow: each has its latency, and a model has hundreds. One message for all gradients can
be sent only when backward is over: then all ranks stand and wait for the network. So gradients are laid in buckets as
backward finishes them, and a full bucket travels while backward goes on.

    backward    g0 | g1 | g2 | g3 | g4 | g5 |
    messages             [g0 g1    ]  [g2 g3 g4     ]  [g5     ]
                         ^ g2 does not fit: launch              ^ only here wait

A bucket takes the next gradient if it then has at most `limit` bytes; if not, it is launched at once, and the gradient
begins a new one. A gradient that alone is larger than the limit has a bucket of its own.

    group.rank, group.size
    pending = group.all_reduce(tensor, async_op=True)      adds up over the ranks, while this rank goes on
    pending.wait()                                         only after it, the sum is in the tensor
"""

import torch


def all_reduce_in_buckets(gradients, limit, group):
    """The mean over the ranks of each gradient.

    gradients: an iterator, which gives one tensor after the other as backward finishes them; of several shapes, which
    are the same on all ranks. limit: in bytes. Returns a list of tensors of the same shapes, in the same order.
    """
    raise NotImplementedError
