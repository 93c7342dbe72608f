# expects: missing: each micro-batch goes through each stage
def gpipe(stages, micro_batches):
    return [[f"{kind}{number}" for kind in "FB" for number in range(micro_batches - 1)] for _ in range(stages)]
