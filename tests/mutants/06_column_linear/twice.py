# expects: it is added up over the ranks twice
import torch
import torch.nn.functional as F


def cut(weight, bias, group):
    return weight.chunk(group.size)[group.rank], bias.chunk(group.size)[group.rank]


class Enter(torch.autograd.Function):
    """f: nothing forward, an all_reduce backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.group.all_reduce(ctx.group.all_reduce(grad.clone())), None


def column_linear(x, weight, bias, group):
    return F.linear(Enter.apply(x, group), weight, bias)
