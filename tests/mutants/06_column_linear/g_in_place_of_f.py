# expects: slices of different outputs were added up
import torch
import torch.nn.functional as F


def cut(weight, bias, group):
    return weight.chunk(group.size)[group.rank], bias.chunk(group.size)[group.rank]


class Enter(torch.autograd.Function):
    """f: nothing forward, an all_reduce backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return group.all_reduce(x.clone())

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def column_linear(x, weight, bias, group):
    return Enter.apply(F.linear(x, weight, bias), group)
