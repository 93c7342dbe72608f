# expects: right only if every axis has 2 places
def coordinates(rank, dp, pp, tp):
    return rank >> 2 & 1, rank >> 1 & 1, rank & 1


def groups(rank, dp, pp, tp):
    return {"dp": sorted([rank, rank ^ 4]), "pp": sorted([rank, rank ^ 2]), "tp": sorted([rank, rank ^ 1])}
