# expects: deadlock with asynchronous sends
def one_f_one_b(stages, micro_batches):
    rows = []
    for rank in range(stages):
        warmup = min(rank, micro_batches)
        row = [f"F{m}" for m in range(warmup)]
        for m in range(warmup, micro_batches):
            row += [f"F{m}", f"B{m - warmup}"]
        rows.append(row + [f"B{m}" for m in range(micro_batches - warmup, micro_batches)])
    return rows
