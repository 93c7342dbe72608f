# expects: missing: each micro-batch goes through each stage
def gpipe(stages, micro_batches):
    return [[f"F{m}" for m in range(micro_batches)] + (["B0"] if stage else []) for stage in range(stages)]
