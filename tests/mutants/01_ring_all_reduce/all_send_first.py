# expects: deadlock: rank 0 waits in send
import torch


def ring_all_reduce(buffer, group):
    n, r = group.size, group.rank
    pieces = list(buffer.chunk(n))
    for step in range(2 * (n - 1)):
        adds = step < n - 1
        out = (r - step) % n if adds else (r + 1 - (step - n + 1)) % n
        into = (out - 1) % n
        arriving = torch.empty_like(pieces[into])
        group.send(pieces[out], (r + 1) % n)
        group.recv(arriving, (r - 1) % n)
        pieces[into] = pieces[into] + arriving if adds else arriving
    return torch.cat(pieces)
