# expects: the dp groups are runs of neighbours
def coordinates(rank, dp, pp, tp):
    return rank // (pp * tp), rank // tp % pp, rank % tp


def groups(rank, dp, pp, tp):
    d, p, t = coordinates(rank, dp, pp, tp)
    return {
        "dp": [rank // dp * dp + i for i in range(dp)],
        "pp": [(d * pp + i) * tp + t for i in range(pp)],
        "tp": [(d * pp + p) * tp + i for i in range(tp)],
    }
