# expects: ranks twice
import torch


def accumulate(micro_batches, loss_of, parameters, group):
    for parameter in parameters:
        parameter.grad = None
    for micro_batch in micro_batches:
        (loss_of(micro_batch) / len(micro_batches)).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    group.all_reduce(flat, "mean")
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter) / group.size)
