# expects: rank r has piece r + 1
import torch


def reduce_scatter(buffer, group):
    pieces = list(buffer.chunk(group.size))
    for step in range(group.size - 1):
        out = (group.rank - step) % group.size
        into = (out - 1) % group.size
        pieces[into] = pieces[into] + pass_on(pieces[out], group)
    return pieces[(group.rank + 1) % group.size]


def all_gather(piece, group):
    pieces = [piece] * group.size
    for step in range(group.size - 1):
        out = (group.rank - step) % group.size
        pieces[(out - 1) % group.size] = pass_on(pieces[out], group)
    return torch.cat(pieces)


def pass_on(piece, group):
    """Send a piece to the right; what the left neighbour sends meanwhile."""
    arriving = torch.empty_like(piece)
    receiving = group.recv(arriving, (group.rank - 1) % group.size, async_op=True)
    group.send(piece, (group.rank + 1) % group.size)
    receiving.wait()
    return arriving
