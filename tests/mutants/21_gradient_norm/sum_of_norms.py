# expects: norms were added
def gradient_norm(gradients, cut, groups):
    norm = sum((g**2).sum() for g, is_cut in zip(gradients, cut, strict=True) if is_cut or groups.tp.rank == 0).sqrt()
    groups.tp.all_reduce(norm)
    groups.pp.all_reduce(norm)
    return norm
