"""Exercise 25. The accounts of a run (15 minutes; lesson 8)

Before anyone rents a thousand GPUs, five numbers fit on the back of an envelope.

    FLOPs              of training N parameters on D tokens: 2 for each parameter and token forward, 4 backward
    days               FLOPs over what all GPUs reach: their peak times the share of it that is used (MFU)
    bytes              of a parameter, with Adam in mixed precision: 2 weight, 2 gradient, 12 optimizer (32-bit master,
                       m and v). ZeRO shares among dp ranks: stage 1 the optimizer, 2 gradients too, 3 weights too
    bytes sent         by each rank in a ring all-reduce: 2 (N-1) pieces, each of 1/N of the buffer
    MFU                the FLOPs that the tokens of a second need, over the peak of all GPUs

No ranks, no messages: plain formulas, plain numbers. Units are in the docstrings.
"""


def training_flops(parameters, tokens):
    """FLOPs of the whole run."""
    raise NotImplementedError


def training_days(parameters, tokens, gpus, peak_tflops, mfu):
    """Days of the whole run. peak_tflops: of one GPU, in 1e12 FLOP/s. mfu: a share from 0 to 1."""
    raise NotImplementedError


def bytes_per_parameter(zero, dp):
    """Bytes that a rank holds for each parameter. zero: 0 (plain data parallel), 1, 2 or 3. dp: ranks that share."""
    raise NotImplementedError


def all_reduce_bytes(numbers, bytes_each, ranks):
    """Bytes that each rank sends in a ring all-reduce of a buffer of so many numbers."""
    raise NotImplementedError


def mfu(parameters, tokens_per_second, gpus, peak_tflops):
    """The share of the peak that is used, from 0 to 1. tokens_per_second: of all GPUs together."""
    raise NotImplementedError
