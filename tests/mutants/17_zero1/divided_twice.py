# expects: is divided by the
import torch


def zero1_step(parameters, gradient, state, lr, eps, group):
    missing = -len(parameters) % group.size
    pad = lambda flat: torch.nn.functional.pad(flat, (0, missing))
    piece, g = pad(parameters).chunk(group.size)[group.rank], group.reduce_scatter(pad(gradient)) / group.size**2
    m, v, t = (state["m"], state["v"], state["t"]) if state else (torch.zeros_like(g), torch.zeros_like(g), 0)
    m, v, t = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2, t + 1
    piece = piece - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + eps)
    return group.all_gather(piece)[: len(parameters)], {"m": m, "v": v, "t": t}
