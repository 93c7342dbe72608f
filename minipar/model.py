"""The GPT that everything else cuts up.

Idea    Token and position embeddings, then blocks of attention and a two-layer perceptron, each with a LayerNorm
        before it and a residual sum around it, then a last LayerNorm and a projection to the vocabulary. A pipeline
        stage is the same class with fewer parts. Nothing here knows about ranks.
Cost    12 D^2 + 13 D parameters a block; 24 D^2 + 4 T D FLOPs a token and block forward, twice that backward.
Legend  B batch, T sequence, D hidden, H heads, K key/value heads, V vocabulary.
Source  Radford et al. 2019 (GPT-2); Ainslie et al. 2023 for grouped key/value heads.
Read    `tp.py`, `pp.py`, `dp.py`, `zero.py` after: four ways to cut it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.batches import IGNORED
from minipar.split import Split, split_of


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. Raises `ValueError`, one line, when the numbers don't fit each other."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    vocab: int = 1024
    sequence: int = 128
    kv_heads: int = 0  # 0: as many as heads
    dropout: float = 0.0
    tied: bool = False  # the projection to the vocabulary is the token embedding

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} makes no model: choose a whole number from 1")
        if self.hidden % self.heads:
            raise ValueError(
                f"hidden={self.hidden} does not divide into {self.heads} heads: choose a multiple of {self.heads}"
            )
        if self.kv_heads < 0 or self.heads % self.key_value_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key/value heads: it must divide them")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is not a share: choose from 0 up to, not including, 1")

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


@dataclass
class Draw:
    """Who is being trained on now: what dropout draws its masks from."""

    seed: int = 0
    samples: list[int] = field(default_factory=list)  # the number of each row of the batch, never used twice


class Dropout(nn.Module):
    """Zero a share `p` of the values. The mask is a function of (seed, sample, place in the model) alone, so it does
    not depend on which rank computes, in which order, or whether for the second time.

    `split` says which piece of the sample's mask this rank needs, when it holds a piece of the activation.
    """

    def __init__(self, p: float, place: str, draw: Draw) -> None:
        super().__init__()
        self.p, self.place, self.draw = p, place, draw
        self.split: Split | None = None

    def forward(self, x: Tensor) -> Tensor:  # [B, ...] -> the same
        if self.p == 0 or not self.training:
            return x
        if len(self.draw.samples) != x.shape[0]:
            raise ValueError(f"dropout needs the numbers of the {x.shape[0]} samples: set model.draw.samples")
        shape = x.shape[1:] if self.split is None else self.split.whole_shape(x.shape)[1:]
        masks = torch.stack([self._mask(sample, shape) for sample in self.draw.samples])
        if self.split is not None:
            masks = self.split.take(masks)
        return x * masks.to(x) / (1 - self.p)

    def _mask(self, sample: int, shape: Iterable[int]) -> Tensor:
        generator = torch.Generator().manual_seed(_number(self.draw.seed, self.place, sample))
        return torch.rand(tuple(shape), generator=generator) >= self.p


class Attention(nn.Module):
    """Causal self-attention; the rows of `qkv` are all queries, then all keys, then all values."""

    def __init__(self, config: GPTConfig, place: str, draw: Draw) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = config.heads, config.key_value_heads, config.head_size
        self.qkv = nn.Linear(config.hidden, (config.heads + 2 * self.kv_heads) * self.head_size)
        self.out = nn.Linear(config.hidden, config.hidden)
        self.dropout = Dropout(config.dropout, f"{place}.scores", draw)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D] -> [B, T, D]
        return self.out(self.mix(self.qkv(x)))

    def mix(self, qkv: Tensor) -> Tensor:  # [B, T, (H + 2 K) D/H] -> [B, T, D]
        """Each position takes from those before it: everything between the two projections."""
        B, T, _ = qkv.shape
        sizes = [n * self.head_size for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (
            part.view(B, T, -1, self.head_size).transpose(1, 2) for part in qkv.split(sizes, dim=-1)
        )  # [B, H, T, D/H], [B, K, T, D/H], [B, K, T, D/H]
        if self.kv_heads != self.heads:
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        if self.dropout.p and self.training:
            mask = torch.full((T, T), float("-inf"), device=qkv.device, dtype=qkv.dtype).triu(1)
            scores = torch.softmax(q @ k.transpose(-2, -1) / self.head_size**0.5 + mask, dim=-1)  # [B, H, T, T]
            mixed = self.dropout(scores) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(B, T, -1)


class MLP(nn.Module):
    """Two layers with a GELU between them, four times as wide inside."""
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D] -> [B, T, D]
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention, then the perceptron, each on a normalised copy of what it adds to."""
    def __init__(self, config: GPTConfig, layer: int, draw: Draw) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config, f"blocks.{layer}", draw)
        self.dropout1 = Dropout(config.dropout, f"blocks.{layer}.1", draw)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)
        self.dropout2 = Dropout(config.dropout, f"blocks.{layer}.2", draw)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D] -> [B, T, D]
        x = x + self.dropout1(self.attention(self.norm1(x)))
        return x + self.dropout2(self.mlp(self.norm2(x)))


class Embedding(nn.Module):
    """What a token is, plus where it stands."""

    def __init__(self, config: GPTConfig, draw: Draw) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab, config.hidden)
        self.position = nn.Parameter(torch.empty(config.sequence, config.hidden))
        self.dropout = Dropout(config.dropout, "embedding", draw)

    def forward(self, tokens: Tensor) -> Tensor:  # [B, T] -> [B, T, D]
        return self.dropout(self.word(tokens) + self.position[: tokens.shape[1]])


class Head(nn.Module):
    """The last LayerNorm, the projection to the vocabulary, and the loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.output = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D] -> [B, T, V]
        return self.output(self.norm(x))

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:  # [B, T, D], [B, T] -> []
        """The sum, not the mean, of the losses of all tokens: only the whole batch knows how many there are."""
        logits = self(x).flatten(0, 1).float() if x.dtype in (torch.bfloat16, torch.float16) else self(x).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def tie(embedding: Embedding, head: Head) -> None:
    """Use the embedding's matrix as the projection to the vocabulary; it then gets a gradient from each use."""
    head.output.weight = embedding.word.weight
    embedding.word.weight.uses = 2  # type: ignore[attr-defined]


class GPT(nn.Module):
    """The model, or a pipeline stage of it: the layers in `layers`, with the embedding if it is the `first` stage and
    the head if it is the `last`. Parameters have the same names in every cut."""

    def __init__(
        self, config: GPTConfig, layers: range | None = None, *, first: bool = True, last: bool = True, seed: int = 0
    ) -> None:
        super().__init__()
        self.config, self.draw = config, Draw(seed)
        layers = range(config.layers) if layers is None else layers
        self.embedding = Embedding(config, self.draw) if first else None
        self.blocks = nn.ModuleDict({str(layer): Block(config, layer, self.draw) for layer in layers})
        self.head = Head(config) if last else None
        if config.tied and self.embedding is not None and self.head is not None:
            tie(self.embedding, self.head)

    @property
    def layers(self) -> list[Block]:
        """The blocks, from the lowest."""
        return [cast(Block, block) for block in self.blocks.values()]

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Tokens `[B, T]` or the last stage's activations `[B, T, D]` -> activations, logits `[B, T, V]`, or, given
        targets, the sum of the losses."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.layers:
            x = block(x)
        if self.head is None:
            return x
        return self.head(x) if targets is None else self.head.loss(x, targets)


def initial_weight(name: str, shape: tuple[int, ...], config: GPTConfig, seed: int) -> Tensor:
    """The whole parameter `name` before training, in float64: drawn from (seed, name) alone, so that every topology
    starts from the same model. Projections into the residual stream are smaller by sqrt(2 layers), as in GPT-2."""
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.float64)
    if "norm" in name:
        return torch.ones(shape, dtype=torch.float64)
    std = 0.02 / (2 * config.layers) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 0.02
    if config.tied and name == "head.output.weight":
        name = "embedding.word.weight"
    generator = torch.Generator().manual_seed(_number(seed, name))
    return torch.empty(shape).normal_(0, std, generator=generator).double()


def materialise(model: GPT, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> GPT:
    """Give a model that was built on torch's "meta" device, and perhaps cut since, its first weights, in place."""
    made: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for path, module in model.named_modules():
        for key, old in list(module.named_parameters(recurse=False)):
            if id(old) not in made:
                split, shape = split_of(old), tuple(old.shape)
                whole = initial_weight(
                    f"{path}.{key}", split.whole_shape(shape) if split else shape, model.config, seed
                )
                piece = split.take(whole) if split else whole
                made[id(old)] = nn.Parameter(piece.to(device, dtype), old.requires_grad)
                made[id(old)].__dict__.update(old.__dict__)
            module.register_parameter(key, made[id(old)])
    return model


def build(config: GPTConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> GPT:
    """The whole model in one process, with its first weights."""
    with torch.device("meta"):
        model = GPT(config, seed=seed)
    return materialise(model, seed, dtype)


def _number(*key: object) -> int:
    """A seed from anything that can be printed."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "big")
