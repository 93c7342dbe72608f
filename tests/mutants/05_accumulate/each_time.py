# expects: Move it behind the loop
def accumulate(micro_batches, loss_of, parameters, group):
    for parameter in parameters:
        parameter.grad = None
    for micro_batch in micro_batches:
        (loss_of(micro_batch) / len(micro_batches)).backward()
        for parameter in parameters:
            group.all_reduce(parameter.grad, "mean")
