# expects: add up at home first
def gradient_norm(gradients, cut, groups):
    total = 0
    for gradient, is_cut in zip(gradients, cut, strict=True):
        squares = (gradient**2).sum()
        if is_cut:
            groups.tp.all_reduce(squares)
        groups.pp.all_reduce(squares)
        total = total + squares
    return total.sqrt()
