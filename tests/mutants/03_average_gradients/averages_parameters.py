# expects: parameters have changed, and only gradients should
import torch


def average_gradients(parameters, tokens, group):
    count = torch.tensor(float(tokens))
    group.all_reduce(count)
    for parameter in parameters:
        parameter.grad *= tokens / count
        group.all_reduce(parameter.grad)
        parameter.data -= parameter.grad
