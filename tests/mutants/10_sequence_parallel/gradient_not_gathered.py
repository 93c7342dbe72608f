# expects: and zeros for the others
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
        whole = torch.zeros(grad.shape[0], grad.shape[1] * ctx.group.size, grad.shape[2], dtype=grad.dtype)
        whole.chunk(ctx.group.size, 1)[ctx.group.rank].copy_(grad)
        return whole, None


def gather(x, group):
    return group.all_gather(x.transpose(0, 1).contiguous()).transpose(0, 1)


def scatter(x, group):
    return group.reduce_scatter(x.transpose(0, 1).contiguous()).transpose(0, 1)
