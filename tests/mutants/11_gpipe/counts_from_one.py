# expects: there are only F0 to
def gpipe(stages, micro_batches):
    return [[f"{kind}{number + 1}" for kind in "FB" for number in range(micro_batches)] for _ in range(stages)]
