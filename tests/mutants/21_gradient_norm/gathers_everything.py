# expects: and not the gradients
import torch


def gradient_norm(gradients, cut, groups):
    mine = [g.flatten() for g, is_cut in zip(gradients, cut, strict=True) if is_cut]
    squares = (groups.tp.all_gather(torch.cat(mine)) ** 2).sum()
    squares = squares + sum((g**2).sum() for g, is_cut in zip(gradients, cut, strict=True) if not is_cut)
    groups.pp.all_reduce(squares)
    return squares.sqrt()
