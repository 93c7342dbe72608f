# expects: share maximum, sum and target's logit, never the logits
import torch


def vocabulary_cross_entropy(logits, targets, first, group):
    widths = torch.zeros(group.size, dtype=torch.long)
    widths[group.rank] = logits.shape[1]
    widths = group.all_reduce(widths).tolist()
    padded = torch.zeros(max(widths), len(targets), dtype=logits.dtype)
    padded[: logits.shape[1]] = logits.t()
    pieces = group.all_gather(padded).chunk(group.size)
    whole = torch.cat([piece[:width] for piece, width in zip(pieces, widths, strict=True)]).t().clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(whole, targets, reduction="none")
    loss.sum().backward()
    return loss.detach(), whole.grad[:, first : first + logits.shape[1]].contiguous()
