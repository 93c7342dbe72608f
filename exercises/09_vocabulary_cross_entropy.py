"""Exercise 9. Cross entropy over a split vocabulary (30 minutes; lesson 3)

The last product of a language model has a column for each word of the vocabulary: for every token 50,000 scores (the
logits), by far the largest activation. Tensor parallel cuts it by words, so each rank has the scores of its own words.
To gather them for the loss would undo all that was saved. But softmax needs, of the other ranks, only a few numbers for
each token.

                    words 0 to 3    words 4 to 6    words 7 to 9       each rank finds      then all know
    token 0           l l l l          l l l            l l l          its largest l        the largest
    token 1           l l l l          l l l            l l l          its sum of exp       the sum
                      rank 0           rank 1           rank 2         the target's l, if   the target's l
                                                                       that word is its own

    loss of a token = log(sum over all words of exp(l)) - l of its target
    gradient        = softmax, minus 1 at the target

    exp(800) is infinite: subtract the largest logit of the token, of ALL words, from each before exp.

    group.rank, group.size
    group.all_reduce(tensor, op)        in place; op is "sum" or "max"
"""

import torch


def vocabulary_cross_entropy(logits, targets, first, group):
    """The loss of each token, and the gradient of their sum with respect to this rank's logits.

    logits: [N, words of this rank], the columns are words `first`, `first` + 1, ...; ranks may have different numbers
    of words. targets: [N], numbers of words in the whole vocabulary, the same on all ranks. Returns (loss, gradient):
    loss [N], the same on all ranks, and gradient with the shape of logits. `logits` must stay as they are.
    """
    raise NotImplementedError
