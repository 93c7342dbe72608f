# expects: neighbours share
import torch.nn.functional as F


def heads_of(heads, kv_heads, group):
    share = heads // group.size
    mine = list(range(group.rank * share, (group.rank + 1) * share))
    return mine, sorted({head % kv_heads for head in mine})


def attention(x, wq, wk, wv, wo, heads, kv_heads, group):
    mine, _ = heads_of(heads, kv_heads, group)
    served = sorted({head // (heads // kv_heads) for head in mine})
    d = wq.shape[0] // len(mine)
    q, k, v = (
        F.linear(x, weight).unflatten(-1, (-1, d)).transpose(1, 2) for weight in (wq, wk, wv)
    )  # [B, heads, T, d]
    of = [served.index(head // (heads // kv_heads)) for head in mine]
    mixed = F.scaled_dot_product_attention(q, k[:, of], v[:, of], is_causal=True)
    return group.all_reduce(F.linear(mixed.transpose(1, 2).flatten(2), wo))
