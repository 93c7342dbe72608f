# expects: only the last stage has a gradient
import torch


def execute(actions, forward, backward, like, group):
    before, after = group.rank - 1, group.rank + 1
    sent = []
    for action in actions:
        kind, micro_batch = action[0], int(action[1:])
        compute, source, to = (forward, before, after) if kind == "F" else (backward, after, before)
        given = None
        if 0 <= source < group.size:
            given = group.recv(torch.empty_like(like), source) if kind == "F" else torch.zeros_like(like)
        result = compute(micro_batch, given)
        if kind == "F" and to < group.size:
            sent.append(group.send(result, to, async_op=True))
    for message in sent:
        message.wait()
