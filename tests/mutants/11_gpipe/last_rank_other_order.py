# expects: all ranks must take the micro-batches in the same order
def gpipe(stages, micro_batches):
    rows = [[f"{kind}{number}" for kind in "FB" for number in range(micro_batches)] for _ in range(stages)]
    rows[-1][micro_batches:] = reversed(rows[-1][micro_batches:])
    return rows
