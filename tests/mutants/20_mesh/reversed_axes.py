# expects: in the order (tp, pp, dp)
def coordinates(rank, dp, pp, tp):
    return rank % tp, rank // tp % pp, rank // (pp * tp)


def groups(rank, dp, pp, tp):
    t, p, d = coordinates(rank, dp, pp, tp)
    return {
        "dp": [(i * pp + p) * tp + t for i in range(dp)],
        "pp": [(d * pp + i) * tp + t for i in range(pp)],
        "tp": [(d * pp + p) * tp + i for i in range(tp)],
    }
