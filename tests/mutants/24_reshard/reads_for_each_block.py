# expects: read each once
import torch


def load_piece(read, saved, dim, blocks, group):
    first, last = group.rank * saved // group.size, ((group.rank + 1) * saved - 1) // group.size
    shares = [block // saved for block in blocks]
    files = range(first, last + 1)
    pieces = []
    for number, (block, share) in enumerate(zip(blocks, shares, strict=True)):
        parts = [read(file).split(shares, dim)[number] for file in files]
        length = block // group.size
        pieces.append(torch.cat(parts, dim).narrow(dim, group.rank * length - first * share, length))
    return torch.cat(pieces, dim)
