# expects: bytes of gradients sends
def accumulate(micro_batches, loss_of, parameters, group):
    for parameter in parameters:
        parameter.grad = None
    for micro_batch in micro_batches:
        (loss_of(micro_batch) / len(micro_batches)).backward()
    for parameter in parameters:
        parameter.grad = group.all_gather(parameter.grad[None]).mean(0)
