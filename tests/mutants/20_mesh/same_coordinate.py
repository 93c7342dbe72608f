# expects: these ranks have the same pp
def coordinates(rank, dp, pp, tp):
    return rank // (pp * tp), rank // tp % pp, rank % tp


def groups(rank, dp, pp, tp):
    place, some = coordinates(rank, dp, pp, tp), range(dp * pp * tp)
    return {
        axis: [other for other in some if coordinates(other, dp, pp, tp)[n] == place[n]]
        for n, axis in enumerate(("dp", "pp", "tp"))
    }
