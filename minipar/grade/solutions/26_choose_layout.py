"""A solution of exercise 26."""

from itertools import product


def choose_layout(layers, hidden, sequence, rows, gpus, per_node, memory):
    def held(dp, tp, pp, zero):
        shares = [dp if zero >= stage else 1 for stage in (1, 2, 3)]
        return parameters / (tp * pp) * (12 / shares[0] + 2 / shares[1] + 2 / shares[2])

    def sent(dp, tp, pp, zero):
        activations = 2 * hidden * sequence * rows / dp
        replicas = 2 * parameters / (tp * pp) * (dp - 1) / dp * (3 if zero == 3 else 2)
        slices = 4 * layers / pp * 2 * (tp - 1) / tp * activations
        return replicas + slices + (2 * activations if pp > 1 else 0)

    def allowed(dp, tp, pp, zero):
        divides = dp * tp * pp == gpus and per_node % tp == 0 and layers % pp == 0 and rows % dp == 0
        return divides and (pp - 1) * dp <= 0.1 * rows and held(dp, tp, pp, zero) <= memory

    parameters = 12 * layers * hidden**2
    degrees = [(gpus // (tp * pp), tp, pp) for tp in range(1, per_node + 1) for pp in range(1, layers + 1)]
    found = [(*some, zero) for some, zero in product(degrees, range(4)) if some[0] and allowed(*some, zero)]
    best = min(found, key=lambda one: (sent(*one), one[3]), default=None)
    return best and dict(zip(("dp", "tp", "pp", "zero"), best, strict=True))
