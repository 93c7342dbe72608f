# expects: backward has moved the random generator
import torch


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function, ctx.state = function, torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx, dy):
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            y = ctx.function(*inputs)
        torch.autograd.backward(y, dy)
        return None, *(x.grad for x in inputs)


def checkpoint(function, *inputs):
    return Again.apply(function, *inputs)
