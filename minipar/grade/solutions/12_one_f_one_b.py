"""A solution of exercise 12."""


def one_f_one_b(stages, micro_batches):
    return [_row(min(stages - rank - 1, micro_batches), micro_batches) for rank in range(stages)]


def _row(warmup, micro_batches):
    row = [f"F{m}" for m in range(warmup)]
    for m in range(warmup, micro_batches):
        row += [f"F{m}", f"B{m - warmup}"]
    return row + [f"B{m}" for m in range(micro_batches - warmup, micro_batches)]
