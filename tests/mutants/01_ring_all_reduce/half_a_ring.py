# expects: the second half of the ring is missing
import torch


def ring_all_reduce(buffer, group):
    n, r = group.size, group.rank
    pieces = list(buffer.chunk(n))
    for step in range(n - 1):
        into = (r - step - 1) % n
        arriving = torch.empty_like(pieces[into])
        receiving = group.recv(arriving, (r - 1) % n, async_op=True)
        group.send(pieces[(r - step) % n], (r + 1) % n)
        receiving.wait()
        pieces[into] = pieces[into] + arriving
    return torch.cat(pieces)
