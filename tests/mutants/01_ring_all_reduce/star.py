# expects: in a ring it sends to rank
import torch


def ring_all_reduce(buffer, group):
    if group.rank == 0:
        total = buffer.clone()
        for source in range(1, group.size):
            arriving = torch.empty_like(buffer)
            group.recv(arriving, source)
            total += arriving
        for to in range(1, group.size):
            group.send(total, to)
        return total
    group.send(buffer, 0)
    return group.recv(torch.empty_like(buffer), 0)
