# expects: rank 1 holds
def one_f_one_b(stages, micro_batches):
    rows = []
    for _ in range(stages):
        warmup = min(stages - 1, micro_batches)
        row = [f"F{m}" for m in range(warmup)]
        for m in range(warmup, micro_batches):
            row += [f"F{m}", f"B{m - warmup}"]
        rows.append(row + [f"B{m}" for m in range(micro_batches - warmup, micro_batches)])
    return rows
