# expects: the mean over the
import torch


def enter(x, group):
    return Enter.apply(x, group)


def leave(x, group):
    return Leave.apply(x, group)


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        return scatter(grad, ctx.group), None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        return gather(grad, ctx.group), None


def gather(x, group):
    return group.all_gather(x.transpose(0, 1).contiguous()).transpose(0, 1)


def scatter(x, group):
    return group.reduce_scatter(x.transpose(0, 1).contiguous()).transpose(0, 1) / group.size
