# expects: f's backward must all_reduce
import torch.nn.functional as F


def cut(weight, bias, group):
    return weight.chunk(group.size)[group.rank], bias.chunk(group.size)[group.rank]


def column_linear(x, weight, bias, group):
    return F.linear(x, weight, bias)
