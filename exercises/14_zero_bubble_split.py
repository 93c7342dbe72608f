"""Exercise 14. Zero bubble: a backward is two things (35 minutes; lesson 4)

A backward computes the gradient of a stage's input, for which the stage before is waiting, and the gradient of its
weights, for which nobody is waiting until the optimizer steps. 1F1B does both before it sends. Split them into B and W:
B goes out at once, and W fills what would be a bubble. F, B and W take about equally long.

    3 stages, 4 micro-batches, the dots are waiting (not written):

    1F1B, in which B does both and takes two steps:

    rank 0   F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    rank 1   .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
    rank 2   .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .

    split, with some W later:

    rank 0   F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
    rank 1   .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
    rank 2   .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    But a micro-batch's activations are held until its W is done. Rank r of 1F1B holds at most p - r micro-batches, so
    it may owe r of the W, and holds p then: not more than rank 0 of 1F1B does.

    Only torch is called, and no autograd: @, transpose, flatten.
"""


def input_gradient(grad, weight):
    """B of a linear layer y = x @ weight.T: the gradient of x.

    grad: the gradient of y, [..., out]; weight: [out, in]. Returns [..., in].
    """
    raise NotImplementedError


def weight_gradient(grad, x):
    """W of a linear layer y = x @ weight.T: the gradient of the weight.

    grad: the gradient of y, [..., out]; x: [..., in]. Returns [out, in].
    """
    raise NotImplementedError


def zero_bubble(stages, micro_batches):
    """What each rank does, in order.

    stages: from 2; micro_batches: from `stages`. Returns a list with one list for each rank, of texts such as "F0",
    "B0" (the gradient of the input) and "W0" (that of the weights). F and B stand in the order of 1F1B.
    """
    raise NotImplementedError
