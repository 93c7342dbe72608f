# expects: one number says it all
import torch


def step(weight, gradient, scale, good, window, lr, groups):
    overflow = 1.0 - torch.isfinite(gradient.float()).float()
    if groups.world.all_reduce(torch.nn.functional.pad(overflow, (0, 99 - len(overflow))), "max").any():
        return weight, scale / 2, 0
    weight, good = weight - lr * gradient.float() / scale, good + 1
    return (weight, scale * 2, 0) if good == window else (weight, scale, good)
