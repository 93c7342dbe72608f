# expects: an all_reduce of them sends
import torch


def average_gradients(parameters, tokens, group):
    counts = group.all_gather(torch.tensor([float(tokens)], dtype=torch.float64))
    for parameter in parameters:
        every = group.all_gather(parameter.grad.unsqueeze(0))
        parameter.grad = torch.einsum("r,r...->...", counts, every) / counts.sum()
