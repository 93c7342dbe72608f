# expects: do not sum over dp
def gradient_norm(gradients, cut, groups):
    squares = sum((g**2).sum() for g, is_cut in zip(gradients, cut, strict=True) if is_cut or groups.tp.rank == 0)
    groups.tp.all_reduce(squares)
    groups.pp.all_reduce(squares)
    groups.dp.all_reduce(squares)
    return squares.sqrt()
