# expects: each reads its own
import torch


def load_piece(read, saved, dim, blocks, group):
    files = [read(number).split([block // saved for block in blocks], dim) for number in range(saved)]
    whole = [torch.cat(parts, dim) for parts in zip(*files, strict=True)]
    for block in whole:
        group.broadcast(block)
    return torch.cat([block.chunk(group.size, dim)[group.rank] for block in whole], dim)
