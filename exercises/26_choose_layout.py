"""Exercise 26. Which layout? (35 minutes; lesson 8)

A model, so many GPUs: how many replicas (dp), slices of a layer (tp), stages (pp), and which stage of ZeRO? Try all,
drop what cannot be, and take the one that sends the least. The rules are simpler here than in `minipar plan`, but the
trade is the same: tp sends much and needs the links inside a node, pp sends little but stands idle, dp needs memory.

    P = parameters / (tp * pp)          on a GPU, before ZeRO

    memory      P * (2 + 2 + 12) bytes: weights, gradients, optimizer. With zero >= 1 the 12 is divided by dp, with
                zero >= 2 the gradients' 2 as well, with zero = 3 the weights' 2 as well
    sent        by a GPU in a step, the sum of
      dp        2 P bytes * (dp - 1) / dp * 2, the all-reduce of gradients; with zero = 3 it is * 3 instead of * 2
      tp        4 all-reduces in each of layers / pp layers, each of 2 (tp - 1) / tp * A bytes
      pp        2 A bytes if pp > 1, else nothing
      with      A = 2 * hidden * sequence * rows / dp bytes, the activations of a replica's rows
    must be     dp * tp * pp = gpus; tp divides per_node; pp divides layers; dp divides rows;
                (pp - 1) * dp / rows <= 0.1, so that the pipeline is full (micro-batches of one row); memory fits
"""


def choose_layout(layers, hidden, sequence, rows, gpus, per_node, memory):
    """The layout that sends the least of those that fit.

    The model has 12 * layers * hidden**2 parameters. rows: of a step, over all replicas. per_node: GPUs in a machine.
    memory: bytes of one GPU. Of layouts that send equally much: the lowest stage of ZeRO.
    Returns {"dp": ..., "tp": ..., "pp": ..., "zero": ...}, or None if nothing fits.
    """
    raise NotImplementedError
