"""Exercise 3. Average the gradients (20 minutes; lesson 2)

Data parallel: every rank has the whole model, and computes gradients on its own sequences. Then all take the same step,
so all need the same gradient: that of the mean loss over all tokens of all ranks. But ranks do not have the same number
of tokens, for sequences differ in length. Each rank's gradient is the mean over its own tokens; the mean of such means
gives a token more weight on a rank that has few.

    rank 0    30 tokens    g0, the mean over its 30   |    30 g0 + 10 g1
    rank 1    10 tokens    g1, the mean over its 10   |    -------------     on both ranks, and not (g0 + g1) / 2
                                                              40

    group.rank, group.size
    group.all_reduce(tensor)         adds up over the ranks, in place; "mean", "max", "min" as second argument
"""

import torch


def average_gradients(parameters, tokens, group):
    """Replace each parameter's gradient by the mean over all tokens of all ranks.

    parameters: list of tensors, each with a `.grad` of its shape: the mean over this rank's tokens.
    tokens: how many tokens this rank had, a whole number above 0.
    Changes every `.grad`, and returns nothing. The parameters themselves stay as they are.
    """
    raise NotImplementedError
