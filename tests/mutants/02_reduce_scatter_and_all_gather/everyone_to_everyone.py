# expects: in a ring it sends to rank
import torch


def reduce_scatter(buffer, group):
    pieces = buffer.chunk(group.size)
    total = pieces[group.rank]
    for distance in range(1, group.size):
        total = total + exchange(pieces[(group.rank + distance) % group.size], distance, group)
    return total


def all_gather(piece, group):
    pieces = [piece] * group.size
    for distance in range(1, group.size):
        pieces[(group.rank - distance) % group.size] = exchange(piece, distance, group)
    return torch.cat(pieces)


def exchange(piece, distance, group):
    arriving = torch.empty_like(piece)
    receiving = group.recv(arriving, (group.rank - distance) % group.size, async_op=True)
    group.send(piece, (group.rank + distance) % group.size)
    receiving.wait()
    return arriving
