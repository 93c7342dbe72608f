# expects: right by luck
import torch.nn.functional as F


def cut(weight, group):
    return weight.chunk(group.size, dim=1)[group.rank]


def row_linear(x, weight, bias, group):
    y = F.linear(x, weight)
    group.all_reduce(y)
    return y + bias
