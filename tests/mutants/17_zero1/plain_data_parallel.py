# expects: as in plain data parallel
import torch


def zero1_step(parameters, gradient, state, lr, eps, group):
    g = group.all_reduce(gradient, "mean")
    m, v, t = (state["m"], state["v"], state["t"]) if state else (torch.zeros_like(g), torch.zeros_like(g), 0)
    m, v, t = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2, t + 1
    return parameters - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + eps), {"m": m, "v": v, "t": t}
