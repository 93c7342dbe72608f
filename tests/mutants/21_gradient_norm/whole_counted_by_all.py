# expects: add it on one tp rank only
def gradient_norm(gradients, cut, groups):
    squares = sum((g**2).sum() for g in gradients)
    groups.tp.all_reduce(squares)
    groups.pp.all_reduce(squares)
    return squares.sqrt()
