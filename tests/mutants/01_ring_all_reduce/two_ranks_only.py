# expects: every rank is wrong
import torch


def ring_all_reduce(buffer, group):
    arriving = torch.empty_like(buffer)
    receiving = group.recv(arriving, (group.rank - 1) % group.size, async_op=True)
    group.send(buffer, (group.rank + 1) % group.size)
    receiving.wait()
    return buffer + arriving
