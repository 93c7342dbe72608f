# expects: so sum over pp as well
def gradient_norm(gradients, cut, groups):
    squares = sum((g**2).sum() for g, is_cut in zip(gradients, cut, strict=True) if is_cut or groups.tp.rank == 0)
    groups.tp.all_reduce(squares)
    return squares.sqrt()
