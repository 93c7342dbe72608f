# expects: Moments are never sent
import torch


def zero1_step(parameters, gradient, state, lr, eps, group):
    n, missing = len(parameters), -len(parameters) % group.size
    pad = lambda flat: torch.nn.functional.pad(flat, (0, missing))
    g = group.all_reduce(pad(gradient), "mean")
    piece = torch.zeros_like(g.chunk(group.size)[0])
    m, v, t = (state["m"], state["v"], state["t"]) if state else (piece, piece, 0)
    m, v, t = 0.9 * group.all_gather(m) + 0.1 * g, 0.999 * group.all_gather(v) + 0.001 * g**2, t + 1
    updated = pad(parameters) - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + eps)
    return updated[:n], {"m": m.chunk(group.size)[group.rank], "v": v.chunk(group.size)[group.rank], "t": t}
