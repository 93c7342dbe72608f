# expects: send one piece in a step, and stop after N-1 steps
import torch


def reduce_scatter(buffer, group):
    total, passed = buffer.clone(), buffer
    for _ in range(group.size - 1):
        passed = pass_on(passed, group)
        total = total + passed
    return total.chunk(group.size)[group.rank]


def all_gather(piece, group):
    pieces = [piece] * group.size
    for step in range(group.size - 1):
        out = (group.rank - step) % group.size
        pieces[(out - 1) % group.size] = pass_on(pieces[out], group)
    return torch.cat(pieces)


def pass_on(piece, group):
    arriving = torch.empty_like(piece)
    receiving = group.recv(arriving, (group.rank - 1) % group.size, async_op=True)
    group.send(piece, (group.rank + 1) % group.size)
    receiving.wait()
    return arriving
