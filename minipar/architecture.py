"""The sizes of a transformer, and what follows from them alone: parameters, FLOPs of a token, bytes kept of it.

Idea    Whatever its name, a decoder is a stack of equal blocks between an embedding and a projection to words. A block
        is attention (queries, keys, values, output) and an MLP of two matrices, or three if it is gated. Each matrix
        costs a token two FLOPs a value forward and four backward; each product's inputs are kept for the backward.
Legend  D hidden, H heads, K width of all key heads, F width inside the MLP, V vocabulary, T sequence.
Source  GPT: Narayanan et al. 2021, equations 2 and 3. Bytes: Korthikanti et al. 2022, section 4, whose 34 D and 5 H T
        this gives for a GPT with dropout. Gated MLP: Shazeer 2020, 'GLU Variants Improve Transformer'.
Read    `catalogue.py` for models that were built; `plan.py`, which lays them out on machines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log

from minipar.compute import checked_recompute, positive

HEAD = 128  # width of a head in models of unknown shape
WORDS = 51_200  # their vocabulary
SLENDER = 128  # their hidden size over their layers: GPT-3's


@dataclass(frozen=True)
class Architecture:
    """`inner` is the MLP's width (0: 4 D), of which a `gated` one has two; `positions` learned ones (0: none, they are
    rotated or left to attention); `rms` norms have no bias; `more` are parameters that nothing else says."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    kv_heads: int = 0
    inner: int = 0
    positions: int = 0
    biases: bool = True
    gated: bool = False
    rms: bool = False
    tied: bool = True
    more: int = 0

    def __post_init__(self) -> None:
        positive(layers=self.layers, hidden=self.hidden, heads=self.heads, vocab=self.vocab)
        if self.hidden % self.heads or self.heads % (self.kv_heads or self.heads):
            raise ValueError(
                f"hidden {self.hidden} and {self.kv_heads or self.heads} key heads do not fit {self.heads} heads: "
                "choose a hidden size that heads divides, and heads that the key heads divide"
            )

    @property
    def kv(self) -> int:
        """Width of all keys, and of all values."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    @property
    def mlp(self) -> int:
        """Width inside the MLP."""
        return self.inner or 4 * self.hidden

    @property
    def block_matrices(self) -> int:
        """Values in the matrices of a block."""
        return self.hidden * (2 * self.hidden + 2 * self.kv + (3 if self.gated else 2) * self.mlp)

    @property
    def block_parameters(self) -> int:
        """Parameters of a block: its matrices, their biases, two norms."""
        biases = 2 * self.hidden + 2 * self.kv + self.hidden + (2 if self.gated else 1) * self.mlp
        norms = (1 if self.rms else 2) * 2 * self.hidden
        return self.block_matrices + (biases if self.biases else 0) + norms

    @property
    def parameters(self) -> int:
        """All parameters."""
        words = self.vocab * self.hidden * (1 if self.tied else 2)
        last_norm = self.hidden * (1 if self.rms else 2)
        return self.layers * self.block_parameters + words + self.positions * self.hidden + last_norm + self.more

    def block_flops(self, sequence: int, recompute: str = "none") -> float:
        """FLOPs of a token in a block, forward and backward: six for each value of its matrices, and `12 T D` for
        attention over all of the sequence; "selective" computes attention's forward again, "full" all of it."""
        matrices, attention = 2.0 * self.block_matrices, 4.0 * sequence * self.hidden
        again = {"none": 0.0, "selective": attention, "full": matrices + attention}[checked_recompute(recompute)]
        return 3 * (matrices + attention) + again

    def word_flops(self) -> float:
        """FLOPs of a token in the projection to words, forward and backward."""
        return 6.0 * self.hidden * self.vocab

    def token_flops(self, sequence: int, recompute: str = "none") -> float:
        """FLOPs of a token in the whole model."""
        return self.layers * self.block_flops(sequence, recompute) + self.word_flops()

    def block_bytes(
        self, sequence: int, *, tp: int = 1, sequence_parallel: bool = False, recompute: str = "none"
    ) -> float:
        """Bytes that a token leaves in a block until its backward, in 2-byte values, without dropout: what the norms
        and the products take in, and attention's scores, `4 H T`. See `activations.layer_activation_bytes`."""
        outside = tp if sequence_parallel else 1
        if checked_recompute(recompute) == "full":
            return 2.0 * self.hidden / outside
        inside = 4 * self.hidden + 4 * self.kv + (6 if self.gated else 4) * self.mlp
        scores = 4.0 * self.heads * sequence if recompute == "none" else 0.0
        return 8.0 * self.hidden / outside + (inside + scores) / tp


def of_size(parameters: float, *, vocab: int = WORDS, sequence: int = 2048) -> Architecture:
    """A GPT of about so many parameters, in the shape that is usual: hidden about 128 times the layers, heads of 128,
    layers and heads that many degrees divide. Raises `ValueError` for fewer than a million, or more than 1e15."""
    positive(parameters=parameters)
    if not 1e6 <= parameters <= 1e15:
        raise ValueError(f"{parameters:g} parameters are no language model: choose from 1e6 to 1e15")
    best: tuple[float, Architecture] | None = None
    ideal = (SLENDER * parameters / 12) ** (1 / 3)
    step = 1024 if ideal >= 4096 else 256 if ideal >= 512 else 32
    for hidden in range(step, int(2.2 * ideal) + 2 * step, step):
        heads = max(1, hidden // min(HEAD, step))
        base = Architecture("", 1, hidden, heads, vocab, positions=sequence)
        rest = (parameters - base.parameters) / base.block_parameters + 1
        for layers in {max(1, round(rest / even) * even) for even in (1, 2, 4, 8)}:
            made = replace(base, layers=layers)
            off = abs(log(made.parameters / parameters))
            shape = abs(log(hidden / layers / SLENDER))
            odd = next(n for n, even in enumerate((8, 4, 2, 1)) if layers % even == 0)
            odd += 2 * next(n for n, even in enumerate((16, 8, 4, 2, 1)) if heads % even == 0)
            score = 8 * max(0.0, off - 0.02) + shape / 4 + odd / 20
            if best is None or score < best[0]:
                best = score, made
    assert best is not None
    return replace(best[1], name=f"{parameters / 1e9:g}B")
