# expects: in GPipe alone
def bubble(schedule, stages, micro_batches, chunks):
    return (stages - 1) / (chunks * micro_batches)


def enough_micro_batches(schedule, stages, chunks, percent):
    step = stages if schedule == "interleaved" else 1
    return step * -(-100 * (stages - 1) // (chunks * percent * step))


def held(schedule, stages, micro_batches, chunks, rank):
    return chunks * micro_batches
