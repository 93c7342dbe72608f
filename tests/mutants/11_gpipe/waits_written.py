# expects: has '.': there are only
def gpipe(stages, micro_batches):
    row = [f"{kind}{number}" for kind in "FB" for number in range(micro_batches)]
    return [["."] * stage + row for stage in range(stages)]
