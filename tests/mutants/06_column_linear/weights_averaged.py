# expects: averaged over the ranks, as in data parallel
import torch
import torch.nn.functional as F


def cut(weight, bias, group):
    return weight.chunk(group.size)[group.rank], bias.chunk(group.size)[group.rank]


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_weight, of_bias = grad.flatten(0, 1).t() @ x.flatten(0, 1), grad.sum((0, 1))
        for one in (of_weight, of_bias):
            ctx.group.all_reduce(one, "mean")
        return ctx.group.all_reduce(grad @ weight), of_weight, of_bias, None


def column_linear(x, weight, bias, group):
    return Linear.apply(x, weight, bias, group)
