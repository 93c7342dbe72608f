# expects: Send one piece in a step, not the whole buffer
import torch


def ring_all_reduce(buffer, group):
    total, passing = buffer.clone(), buffer
    for _ in range(group.size - 1):
        arriving = torch.empty_like(buffer)
        receiving = group.recv(arriving, (group.rank - 1) % group.size, async_op=True)
        group.send(passing, (group.rank + 1) % group.size)
        receiving.wait()
        total += arriving
        passing = arriving
    return total
