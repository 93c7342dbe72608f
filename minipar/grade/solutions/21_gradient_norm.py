"""A solution of exercise 21."""


def gradient_norm(gradients, cut, groups):
    mine = [gradient for gradient, is_cut in zip(gradients, cut, strict=True) if is_cut or groups.tp.rank == 0]
    squares = sum(((gradient**2).sum() for gradient in mine), gradients[0].new_zeros(()))
    groups.tp.all_reduce(squares)
    groups.pp.all_reduce(squares)
    return squares.sqrt()
