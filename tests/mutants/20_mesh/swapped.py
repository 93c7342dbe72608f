# expects: these are tp groups
def coordinates(rank, dp, pp, tp):
    return rank // (pp * tp), rank // tp % pp, rank % tp


def groups(rank, dp, pp, tp):
    d, p, t = coordinates(rank, dp, pp, tp)
    return {
        "tp": [(i * pp + p) * tp + t for i in range(dp)],
        "pp": [(d * pp + i) * tp + t for i in range(pp)],
        "dp": [(d * pp + p) * tp + i for i in range(tp)],
    }
