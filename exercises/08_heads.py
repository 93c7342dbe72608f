"""Exercise 8. Attention, cut by heads (40 minutes; lesson 3)

Heads of attention do not know of each other, so each rank computes some of them, from beginning to end. With grouped
queries several neighbouring query heads share one key/value head. A rank needs the key/value heads of its query heads,
and no others; one that serves the queries of two ranks is computed on both.

    4 query heads, 2 key/value heads       on 2 ranks                on 4 ranks

    query        0  1  2  3                rank 0   q 0 1   kv 0     rank 0   q 0   kv 0
    key/value    0  0  1  1                rank 1   q 2 3   kv 1     rank 1   q 1   kv 0
                                                                     rank 2   q 2   kv 1
                                                                     rank 3   q 3   kv 1

The output projection mixes all heads. It is cut by rows: each rank multiplies what its heads give with its slice, and
gets a part of the sum. The parts are added up, and that is the only message.

    group.rank, group.size
    group.all_reduce(tensor)         adds up over the ranks, in place, and returns the tensor
"""

import torch
import torch.nn.functional as F


def heads_of(heads, kv_heads, group):
    """This rank's query heads, and the key/value heads that they need: two lists of numbers, each in rising order.

    heads: a multiple of group.size and of kv_heads. Rank 0 has the first query heads, rank 1 the next, and so on.
    """
    raise NotImplementedError


def attention(x, wq, wk, wv, wo, heads, kv_heads, group):
    """Causal self-attention of all heads, after the output projection.

    x: [B, T, D], the same on all ranks. The weights are this rank's slices, for its q query and k key/value heads (see
    `heads_of`), each of d numbers: wq [q d, D], wk and wv [k d, D], wo [D, q d]; no biases. heads, kv_heads: how many
    there are on all ranks together. Scores are divided by the square root of d. Returns [B, T, D], the same on all
    ranks.
    """
    raise NotImplementedError
