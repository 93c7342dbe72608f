# expects: ranks have different norms
def gradient_norm(gradients, cut, groups):
    squares = sum((g**2).sum() for g, is_cut in zip(gradients, cut, strict=True) if is_cut or groups.tp.rank == 0)
    whole = groups.tp.all_gather(squares.reshape(1)).sum()
    if groups.tp.rank == 0:
        squares = whole
    groups.pp.all_reduce(squares)
    return squares.sqrt()
