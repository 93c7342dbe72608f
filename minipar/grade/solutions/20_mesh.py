"""A solution of exercise 20."""


def coordinates(rank, dp, pp, tp):
    rest, t = divmod(rank, tp)
    d, p = divmod(rest, pp)
    return d, p, t


def groups(rank, dp, pp, tp):
    d, p, t = coordinates(rank, dp, pp, tp)
    number = lambda d, p, t: (d * pp + p) * tp + t
    return {
        "dp": [number(i, p, t) for i in range(dp)],
        "pp": [number(d, i, t) for i in range(pp)],
        "tp": [number(d, p, i) for i in range(tp)],
    }
