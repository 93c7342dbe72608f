# expects: the warm-up has at most as many forwards as there are micro-batches
def one_f_one_b(stages, micro_batches):
    rows = []
    for rank in range(stages):
        warmup = stages - rank - 1
        row = [f"F{m}" for m in range(warmup)]
        for m in range(warmup, micro_batches):
            row += [f"F{m}", f"B{m - warmup}"]
        rows.append(row + [f"B{m}" for m in range(max(micro_batches - warmup, 0), micro_batches)])
    return rows
