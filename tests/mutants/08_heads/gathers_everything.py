# expects: one all_reduce of the outputs
import torch
import torch.nn.functional as F


def heads_of(heads, kv_heads, group):
    share, queries = heads // group.size, heads // kv_heads
    mine = list(range(group.rank * share, (group.rank + 1) * share))
    return mine, sorted({head // queries for head in mine})


def attention(x, wq, wk, wv, wo, heads, kv_heads, group):
    mine, served = heads_of(heads, kv_heads, group)
    d = wq.shape[0] // len(mine)
    q, k, v = (F.linear(x, weight).unflatten(-1, (-1, d)).transpose(1, 2) for weight in (wq, wk, wv))
    of = [served.index(head // (heads // kv_heads)) for head in mine]
    mixed = F.scaled_dot_product_attention(q, k[:, of], v[:, of], is_causal=True).transpose(1, 2).flatten(2)
    every, whole = group.all_gather(mixed), group.all_gather(wo)
    return F.linear(torch.cat(every.chunk(group.size), -1), torch.cat(whole.chunk(group.size), -1))
