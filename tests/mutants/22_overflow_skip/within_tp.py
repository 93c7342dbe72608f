# expects: ranks agree within tp only
import torch


def step(weight, gradient, scale, good, window, lr, groups):
    overflow = 1.0 - torch.isfinite(gradient).all().float()
    if groups.tp.all_reduce(overflow, "max") > 0:
        return weight, scale / 2, 0
    weight, good = weight - lr * gradient.float() / scale, good + 1
    return (weight, scale * 2, 0) if good == window else (weight, scale, good)
