# expects: before F1: GPipe does all forwards first
def gpipe(stages, micro_batches):
    return [[f"{kind}{number}" for number in range(micro_batches) for kind in "FB"] for _ in range(stages)]
