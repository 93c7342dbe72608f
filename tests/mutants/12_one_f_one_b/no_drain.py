# expects: after the pairs come the backwards of the warm-up
def one_f_one_b(stages, micro_batches):
    rows = []
    for rank in range(stages):
        warmup = min(stages - rank - 1, micro_batches)
        row = [f"F{m}" for m in range(warmup)]
        for m in range(warmup, micro_batches):
            row += [f"F{m}", f"B{m - warmup}"]
        rows.append(row)
    return rows
