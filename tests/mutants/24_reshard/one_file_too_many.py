# expects: of which it needs nothing
import torch


def load_piece(read, saved, dim, blocks, group):
    first, last = group.rank * saved // group.size, min((group.rank + 1) * saved, saved * group.size - 1) // group.size
    shares = [block // saved for block in blocks]
    files = [read(number).split(shares, dim) for number in range(first, last + 1)]
    pieces = []
    for block, share, parts in zip(blocks, shares, zip(*files, strict=True), strict=True):
        length = block // group.size
        pieces.append(torch.cat(parts, dim).narrow(dim, group.rank * length - first * share, length))
    return torch.cat(pieces, dim)
