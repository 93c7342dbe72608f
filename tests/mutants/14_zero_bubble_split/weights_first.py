# expects: comes before B0
def input_gradient(grad, weight):
    return grad @ weight


def weight_gradient(grad, x):
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def zero_bubble(stages, micro_batches):
    return [with_weights(one_f_one_b(stages - rank - 1, micro_batches), may_owe=rank) for rank in range(stages)]


def one_f_one_b(warmup, micro_batches):
    row = [f"F{m}" for m in range(warmup)]
    for m in range(warmup, micro_batches):
        row += [f"F{m}", f"B{m - warmup}"]
    return row + [f"B{m}" for m in range(micro_batches - warmup, micro_batches)]


def with_weights(actions, may_owe):
    row, owed = [], []
    for action in actions:
        if action[0] == "B":
            owed.append("W" + action[1:])
        if len(owed) > may_owe:
            row.append(owed.pop(0))
        row.append(action)
    return row + owed
