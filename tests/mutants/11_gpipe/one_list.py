# expects: return one list for each rank
def gpipe(stages, micro_batches):
    return [f"{kind}{number}" for kind in "FB" for number in range(micro_batches)]
