# expects: round up to a multiple of p
def bubble(schedule, stages, micro_batches, chunks):
    return (stages - 1) / (chunks * micro_batches)


def enough_micro_batches(schedule, stages, chunks, percent):
    return -(-100 * (stages - 1) // (chunks * percent))


def held(schedule, stages, micro_batches, chunks, rank):
    if schedule == "gpipe":
        return micro_batches
    warmup = stages - rank - 1 if schedule == "1f1b" else (chunks - 1) * stages + 2 * (stages - rank - 1)
    return min(chunks * micro_batches, warmup + 1)
