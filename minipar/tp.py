"""Tensor parallel: cut each layer's matrices, and let a group of ranks compute every layer together.

Idea    Cut the first matrix of a pair by columns and the second by rows. Each rank then computes a slice of the inner
        activation all the way through the nonlinearity, and only the last product is a partial sum, to be added up
        over the ranks: one all_reduce forward (g) and, mirrored, one backward (f) for attention and one each for the
        MLP. Attention is cut by heads, the vocabulary by words.

                    x           f         W1 | W1'          gelu          W2 / W2'         g
                 [B, T, D]  --------->  [B, T, F/tp]  ----------------->  [B, T, D] partial over tp --> [B, T, D]
                             columns: a slice of F                rows: a partial sum

        Sequence parallel replaces "the whole activation on every rank" between those pairs by "a slice of the
        sequence on each": g becomes a reduce_scatter and f an all_gather, of together the same bytes.
Cost    Per layer and micro-batch, 4 all_reduces of [B, T, D]. Parameters and their gradients: 1/tp of the matrices.
Legend  B batch, T sequence, D hidden, F what the pair is wide inside, V vocabulary.
Source  Shoeybi et al. 2019, 'Megatron-LM'; Korthikanti et al. 2022 for sequence parallel.
Read    `model.py` before; `train.py` after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.batches import IGNORED
from minipar.comm import Group, Pending
from minipar.flat import Write, takes_gradients, write_gradient
from minipar.message import HALF
from minipar.model import GPT, Embedding, Head, tie
from minipar.split import Split

# Borders: between the split layers each rank holds the whole activation, or a slice of the sequence.


class Whole:
    """Every rank holds the whole activation outside of the split layers (Megatron's f and g)."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def enter(self, x: Tensor) -> Pending:  # [B, T, D] -> [B, T, D]
        return Pending(self.group.wire, None, [], lambda: x)

    def enter_backward(self, grad: Tensor) -> Pending:  # [B, T, D] partial over tp -> [B, T, D]
        return self.group.all_reduce(grad, tag="tp.f backward", async_op=True)

    def leave(self, x: Tensor) -> Tensor:  # [B, T, D] partial over tp -> [B, T, D]
        return self.group.all_reduce(x, tag="tp.g forward")

    def leave_backward(self, grad: Tensor) -> Tensor:  # [B, T, D] -> [B, T, D]
        return grad


class BySequence:
    """Each rank holds its slice of the sequence outside of the split layers."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def enter(self, x: Tensor) -> Pending:  # [B, T/tp, D] -> [B, T, D]
        gathered = self.group.all_gather(x.contiguous(), tag="tp.sequence gather", async_op=True)
        return Pending(self.group.wire, None, [gathered], lambda: _ranks_to_sequence(gathered.wait(), self.group.size))

    def enter_backward(self, grad: Tensor) -> Pending:  # [B, T, D] partial over tp -> [B, T/tp, D]
        by_rank = _sequence_to_ranks(grad, self.group.size)
        return self.group.reduce_scatter(by_rank, tag="tp.sequence scatter", async_op=True)

    def leave(self, x: Tensor) -> Tensor:  # [B, T, D] partial over tp -> [B, T/tp, D]
        return self.enter_backward(x).wait()

    def leave_backward(self, grad: Tensor) -> Tensor:  # [B, T/tp, D] -> [B, T, D]
        return self.enter(grad).wait()


Border = Whole | BySequence
Postpone = Callable[[nn.Parameter, Write], None]


def _ranks_to_sequence(x: Tensor, ranks: int) -> Tensor:  # [tp*B, T/tp, D] -> [B, T, D]
    B = x.shape[0] // ranks
    return x.view(ranks, B, *x.shape[1:]).transpose(0, 1).reshape(B, -1, x.shape[-1])


def _sequence_to_ranks(x: Tensor, ranks: int) -> Tensor:  # [B, T, D] -> [tp*B, T/tp, D]
    B, T, D = x.shape
    return x.view(B, ranks, T // ranks, D).transpose(0, 1).reshape(ranks * B, T // ranks, D)


class _Leave(torch.autograd.Function):
    """g: out of the split layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, border: Border) -> Tensor:
        ctx.border = border
        return border.leave(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.border.leave_backward(grad), None


class _ColumnLinear(torch.autograd.Function):
    """f, then `x W^T + b`. Backward, the weight's gradient is computed while the input's gradient travels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: ColumnLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.postpone, ctx.bias = layer, layer.postpone, bias is not None
        return F.linear(layer.border.enter(x).wait(), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # [B, T, F/tp] -> [B, T, D]
        x, weight = ctx.saved_tensors
        border = ctx.layer.border
        # Sequence parallel gathers again what it did not keep; a frozen weight does not need it.
        whole = border.enter(x) if ctx.layer.weight.requires_grad else x
        grad_x = border.enter_backward(grad @ weight) if ctx.needs_input_grad[0] else None
        grad_weight = _weight_gradient(ctx, grad, whole)
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.bias else None
        return grad_x.wait() if grad_x else None, grad_weight, grad_bias, None


class _RowLinear(torch.autograd.Function):
    """`x W^T`, a partial sum, then g. The bias is added once: by the first rank, to its partial sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: RowLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.postpone = layer, layer.postpone
        first = layer.border.group.rank == 0
        return layer.border.leave(F.linear(x, weight, bias if first else None))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # [B, T, D] -> [B, T, F/tp]
        x, weight = ctx.saved_tensors
        grad = ctx.layer.border.leave_backward(grad)
        grad_x = grad @ weight
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, _weight_gradient(ctx, grad, x), grad_bias, None


def _weight_gradient(ctx: Any, grad: Tensor, x: Tensor | Pending) -> Tensor | None:
    """`grad^T x`: for autograd to add up; or written at once where data parallel wants it (`flat.write_gradient`),
    now, or postponed to the W action of a schedule that splits the backward."""
    weight, rows = ctx.layer.weight, lambda: (x if isinstance(x, Tensor) else x.wait()).flatten(0, -2)
    if not weight.requires_grad:
        return None
    if not takes_gradients(weight):
        return grad.flatten(0, -2).t() @ rows()

    def add(place: Tensor, fresh: bool) -> None:
        left, right = grad.flatten(0, -2).t(), rows()
        torch.mm(left, right, out=place) if fresh else place.addmm_(left, right)

    if ctx.postpone is None:
        write_gradient(weight, add)
    else:
        ctx.postpone(weight, add)
    return None


def _known_to_autograd(weight: nn.Parameter) -> Tensor:
    """The weight; detached where its gradient is written without autograd, which would else report an empty one."""
    return weight.detach() if takes_gradients(weight) else weight


class ColumnLinear(nn.Module):
    """Holds rows of W, that is columns of W^T: `[B, T, D] -> [B, T, F/tp]`, a slice of the outputs on each rank."""

    def __init__(self, whole: nn.Linear, border: Border, blocks: tuple[int, ...] | None = None) -> None:
        super().__init__()
        group = border.group
        self.border = border
        self.postpone: Postpone | None = None
        self.split = Split(0, group.rank, group.size, blocks or (whole.out_features,))
        self.weight = _cut(whole.weight, self.split)
        self.bias = None if whole.bias is None else _cut(whole.bias, self.split)

    def forward(self, x: Tensor) -> Tensor:
        return _ColumnLinear.apply(x, _known_to_autograd(self.weight), self.bias, self)


class RowLinear(nn.Module):
    """Holds columns of W, that is rows of W^T: `[B, T, F/tp] -> [B, T, D]`. The bias is added once, to the sum."""

    def __init__(self, whole: nn.Linear, border: Border) -> None:
        super().__init__()
        group = border.group
        self.border = border
        self.postpone: Postpone | None = None
        self.weight = _cut(whole.weight, Split(1, group.rank, group.size, (whole.in_features,)))
        self.bias = whole.bias

    def forward(self, x: Tensor) -> Tensor:
        return _RowLinear.apply(x, _known_to_autograd(self.weight), self.bias, self)


class _Words(torch.autograd.Function):
    """Rows of the matrix, zero where a word is not `known` here. Backward, only the rows that were used are added to:
    a whole matrix of zeros for every micro-batch would cost a pipeline's first stage some hundredths of its time."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, known: Tensor, weight: Tensor, layer: VocabularyEmbedding, _: Tensor) -> Tensor:
        ctx.save_for_backward(rows, known)
        ctx.layer = layer
        return F.embedding(rows, weight) * known.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, known = ctx.saved_tensors
        weight, values = ctx.layer.weight, (grad * known.unsqueeze(-1)).flatten(0, -2)

        def add(place: Tensor, fresh: bool) -> None:
            if fresh:
                place.zero_()
            if place.dtype in HALF:  # a frequent word is the sum of many: in 32 bits
                place.add_(torch.zeros_like(place, dtype=torch.float32).index_add_(0, rows.flatten(), values.float()))
            else:
                place.index_add_(0, rows.flatten(), values)

        dense = None
        if weight.requires_grad and takes_gradients(weight):
            write_gradient(weight, add)
        elif weight.requires_grad:
            dense = torch.zeros_like(weight)
            add(dense, False)
        return None, None, dense, None, None


class VocabularyEmbedding(nn.Module):
    """Each rank knows a slice of the words and answers zero for the others; g adds the answers up."""

    def __init__(self, whole: nn.Embedding, border: Border) -> None:
        super().__init__()
        self.border = border
        self.split = Split(0, border.group.rank, border.group.size, (whole.num_embeddings,))
        self.weight = _cut(whole.weight, self.split)
        self._begin = torch.empty(0, device="cpu", requires_grad=True)  # autograd must know that a gradient is wanted

    def forward(self, tokens: Tensor) -> Tensor:  # [B, T] -> [B, T, D], or [B, T/tp, D] by sequence
        mine = tokens - self.border.group.rank * self.split.shares[0]
        known = (mine >= 0) & (mine < self.weight.shape[0])
        words = _Words.apply(mine.where(known, 0), known, _known_to_autograd(self.weight), self, self._begin)
        return _Leave.apply(words, self.border)


class SplitEmbedding(nn.Module):
    """`model.Embedding` with its words cut; by sequence, each rank adds the positions of its slice."""

    def __init__(self, whole: Embedding, border: Border) -> None:
        super().__init__()
        self.word = VocabularyEmbedding(whole.word, border)
        self.position, self.dropout, self.border = whole.position, whole.dropout, border
        if isinstance(border, BySequence):
            _sees_a_slice(self.position)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word(tokens)
        positions = self.position[: tokens.shape[1]]
        if isinstance(self.border, BySequence):
            positions = positions.chunk(self.border.group.size)[self.border.group.rank]
        return self.dropout(x + positions)


class _CrossEntropy(torch.autograd.Function):
    """Softmax over a vocabulary that no rank sees whole: the ranks share a maximum and a sum for each token, instead
    of the logits. Columns from `words` on are padding and take no part."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, words: int, group: Group) -> Tensor:  # [N, V/tp], [N]
        wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        wide = wide.detach()[:, :words]
        highest = wide.amax(1) if words else wide.new_full((wide.shape[0],), float("-inf"))  # [N]
        group.all_reduce(highest, "max", tag="tp.loss maximum")
        wide.sub_(highest.unsqueeze(1))
        mine = targets - group.rank * logits.shape[1]
        known = (mine >= 0) & (mine < words)
        right = wide.gather(1, mine.where(known, 0).unsqueeze(1)).squeeze(1) if words else torch.zeros_like(highest)
        shares = wide.exp_()  # [N, words], not yet divided by their sum
        sums = torch.stack([shares.sum(1), right * known])  # [2, N] partial over tp
        total, right = group.all_reduce(sums, tag="tp.loss sums")
        learned = targets != IGNORED
        ctx.save_for_backward(shares, total, mine.where(known, 0), known & learned, learned)
        ctx.logits = (logits.shape, logits.dtype)
        return ((total.log() - right) * learned).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # softmax minus one at the target
        shares, total, mine, known, learned = ctx.saved_tensors
        (_, columns), dtype = ctx.logits
        words = shares.shape[1]
        shares.mul_((learned * grad / total).unsqueeze(1))  # in place: each graph is walked once
        if words:
            shares.scatter_add_(1, mine.unsqueeze(1), (-grad * known).to(shares).unsqueeze(1))
        grad_logits = shares if words == columns else F.pad(shares, (0, columns - words))
        grad_logits = grad_logits.to(dtype)
        return grad_logits, None, None, None


def cross_entropy(logits: Tensor, targets: Tensor, words: int, group: Group) -> Tensor:
    """The sum of the losses of N tokens, from each rank's slice of the logits: `[N, V/tp], [N] -> []`.

    `words` is how many columns of this rank's slice are words of the vocabulary, the rest being padding. Targets
    number the whole vocabulary; `IGNORED` ones count nothing. The logits are overwritten: no other tensor of a model is
    so large.
    """
    return _CrossEntropy.apply(logits, targets, words, group)


class SplitHead(nn.Module):
    """`model.Head` with its projection cut by words."""

    def __init__(self, whole: Head, border: Border) -> None:
        super().__init__()
        self.norm, self.border = whole.norm, border
        self.output = ColumnLinear(whole.output, border)
        share, rank = self.output.split.shares[0], border.group.rank
        self.words = max(0, min(share, whole.output.out_features - rank * share))
        if isinstance(border, BySequence):
            _sees_a_slice(self.norm.weight, self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D] or [B, T/tp, D] -> [B, T, V/tp]
        return self.output(self.norm(x))

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:  # [B, T] -> []
        return cross_entropy(self(x).flatten(0, 1), targets.flatten(), self.words, self.border.group)


def parallelize(model: GPT, group: Group, *, sequence_parallel: bool = False) -> GPT:
    """Cut the layers of a model (or stage) that is still on torch's "meta" device, in place.

    Raises `ValueError` when heads, or the sequence, can't be shared by the group.
    """
    config = model.config
    check(config.heads, config.key_value_heads, config.sequence if sequence_parallel else 0, group.size)
    border: Border = BySequence(group) if sequence_parallel else Whole(group)
    if model.embedding is not None:
        model.embedding = SplitEmbedding(model.embedding, border)  # type: ignore[assignment]
    for block in model.layers:
        attention, mlp = block.attention, block.mlp
        attention.heads, attention.kv_heads = attention.heads // group.size, attention.kv_heads // group.size
        blocks = tuple(n * config.head_size for n in (config.heads, config.key_value_heads, config.key_value_heads))
        attention.qkv = ColumnLinear(attention.qkv, border, blocks)  # type: ignore[assignment]
        attention.out = RowLinear(attention.out, border)  # type: ignore[assignment]
        mlp.up = ColumnLinear(mlp.up, border)  # type: ignore[assignment]
        mlp.down = RowLinear(mlp.down, border)  # type: ignore[assignment]
        attention.dropout.split = Split(1, group.rank, group.size, (config.heads,))
        if sequence_parallel:
            _sees_a_slice(*block.norm1.parameters(), *block.norm2.parameters())
    if model.head is not None:
        model.head = SplitHead(model.head, border)  # type: ignore[assignment]
    if model.embedding is not None and model.head is not None and config.tied:
        tie(model.embedding, model.head)
    if sequence_parallel:
        _slice_dropout(model, group)
    return model


def check(heads: int, kv_heads: int, sequence: int, ranks: int) -> None:
    """Raise `ValueError`, naming the choices, unless `ranks` can share the heads and the sequence (0: not split)."""
    for count, what in ((heads, "heads"), (kv_heads, "key/value heads"), (sequence, "positions of the sequence")):
        if count % ranks:
            choices = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0 and kv_heads % n == 0)
            raise ValueError(f"{count} {what} cannot be shared by tp={ranks} ranks: choose tp from {choices}")


def sees_a_slice(parameter: Tensor) -> bool:
    """Whether each rank of the group has seen only its slice of the sequence go through this parameter, so that its
    gradient is a partial sum over tp."""
    return getattr(parameter, "sees_a_slice", False)


def _sees_a_slice(*parameters: nn.Parameter) -> None:
    for parameter in parameters:
        parameter.sees_a_slice = True  # type: ignore[attr-defined]


def _slice_dropout(model: GPT, group: Group) -> None:
    """The dropouts outside of the split layers see a slice of the sequence, and need that slice of the mask."""
    outside = [dropout for block in model.layers for dropout in (block.dropout1, block.dropout2)]
    for dropout in [*outside, *([model.embedding.dropout] if model.embedding is not None else [])]:
        dropout.split = Split(1, group.rank, group.size, (model.config.sequence,))


def _cut(whole: Tensor, split: Split) -> nn.Parameter:
    """A parameter with the shape of this rank's piece, on the whole one's device, its values still to come."""
    shape = list(whole.shape)
    shape[split.dim] = sum(split.shares)
    piece = nn.Parameter(torch.empty(shape, dtype=whole.dtype, device=whole.device))
    piece.tp_split = split  # type: ignore[attr-defined]
    return piece
