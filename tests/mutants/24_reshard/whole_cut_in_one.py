# expects: each block is cut by itself
import torch


def load_piece(read, saved, dim, blocks, group):
    files = [read(number).split([block // saved for block in blocks], dim) for number in range(saved)]
    whole = torch.cat([torch.cat(parts, dim) for parts in zip(*files, strict=True)], dim)
    return whole.chunk(group.size, dim)[group.rank]
