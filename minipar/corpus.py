"""Text -> clean -> deduplicate -> tokenise -> packed batches that resume exactly.

Idea    `prepare` makes of any text two long arrays of tokens, one to train on and one held out, and an account of what
        was thrown away on the way. Documents stand one behind the other, each closed by <|endoftext|>, so a batch is
        nothing but a slice. Without data of your own it takes the source of Python's standard library, which every
        machine has: licence headers, near-duplicate files, generated tables, test files in broken encodings.

            clean.py: find, decode, filter -> dedup.py: copies, held-out split -> here: tokens -> batches.py: steps

Source  Byte-level BPE: Radford et al. 2019 (GPT-2), by the library `tokenizers`.
Cost    About 1.5 seconds per megabyte of text, once; then the result is read from a cache in milliseconds. On disk two
        bytes per token (four when the vocabulary exceeds 65,536).
Read    `clean.py` and `dedup.py` for the steps before, `batches.py` for the steps after.

The cache is $MINIPAR_CACHE, else $XDG_CACHE_HOME/minipar, else ~/.cache/minipar: one file per preparation, which may
be deleted at any time.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from minipar import clean, dedup
from minipar.batches import IGNORED, Batch, Batches, EvaluationBatches, RandomBatches
from minipar.cache import Kept, cached
from minipar.clean import REASONS, CorpusError, Source

if TYPE_CHECKING:
    import tokenizers

__all__ = [
    "IGNORED",
    "Batch",
    "Batches",
    "Corpus",
    "CorpusError",
    "EvaluationBatches",
    "RandomBatches",
    "Statistics",
    "Tokenizer",
    "prepare",
]

ALGORITHM = 1  # count up when the same text gives other tokens or another file: old cache files are then not found
SAMPLE_BYTES = 4_000_000  # of the standard library
HELD_OUT = 0.05  # share of the documents
SMALLEST, LARGEST = 260, 2**20  # vocabulary
END_OF_TEXT = "<|endoftext|>"  # token 0


@dataclass(frozen=True)
class Statistics:
    """What `prepare` found, what it threw away and why, and what is left. `str()` gives the table.

    documents_found = sum(dropped) + exact_duplicates + near_duplicates + contaminated + documents_kept, where
    contaminated documents are held-out ones that training knew. `bytes_kept` are of UTF-8, and `bytes_per_token`
    counts <|endoftext|> as a token. `held_out_seen` is the share of the held-out 13-grams that training contains.
    """

    name: str
    files_found: int
    documents_found: int
    documents_kept: int
    bytes_read: int
    bytes_kept: int
    dropped: dict[str, int]
    declared_encoding: int
    repaired_encoding: int
    control_characters: int
    exact_duplicates: int
    near_duplicates: int
    contaminated: int
    held_out_seen: float
    documents_held_out: int
    tokens_train: int
    tokens_held_out: int
    vocabulary: int
    vocabulary_used: int

    @property
    def duplicate_rate(self) -> float:
        """Share of exact and near duplicates among the documents that passed the filters."""
        passed = self.documents_found - sum(self.dropped.values())
        return (self.exact_duplicates + self.near_duplicates) / max(1, passed)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes that one token stands for, on average: what the vocabulary buys."""
        return self.bytes_kept / max(1, self.tokens_train + self.tokens_held_out)

    def __str__(self) -> str:
        rows: list[tuple[str, int, str]] = [
            ("files found", self.files_found, shorten(self.name, 40)),
            ("documents read", self.documents_found, f"{self.bytes_read:,} bytes"),
            *((f"- {reason}", number, "") for reason, number in self.dropped.items() if number),
            ("- exact duplicates", self.exact_duplicates, ""),
            ("- near duplicates", self.near_duplicates, f"duplicate rate {self.duplicate_rate:.1%}"),
            ("- contaminated", self.contaminated, f"held-out 13-grams still seen {self.held_out_seen:.1%}"),
            ("= documents kept", self.documents_kept, f"{self.bytes_kept:,} bytes"),
            ("of them held out", self.documents_held_out, ""),
            ("declared encodings", self.declared_encoding, ""),
            ("repaired encodings", self.repaired_encoding, ""),
            ("control characters", self.control_characters, "removed"),
            ("tokens to train on", self.tokens_train, f"{self.bytes_per_token:.2f} bytes per token"),
            ("tokens held out", self.tokens_held_out, ""),
            ("vocabulary", self.vocabulary, f"{self.vocabulary_used:,} used"),
        ]
        return "\n".join(f"{label:<20}{number:>15,}   {note}".rstrip() for label, number, note in rows)


def shorten(text: str, columns: int) -> str:
    """The text on one line of at most so many columns, of which a Chinese character fills two."""
    shown = "".join(character if character.isprintable() else "?" for character in text)
    widths = np.cumsum([1 + (unicodedata.east_asian_width(character) in "WF") for character in shown])
    return shown if not shown or widths[-1] <= columns else shown[: int((widths < columns - 2).sum())] + "..."


@dataclass(frozen=True)
class Tokenizer:
    """Text to token numbers and back. `json` is the whole of it, in the format of the library `tokenizers`."""

    json: str

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[str]]:
        return Tokenizer, (self.json,)  # to another process: without `bpe`, which would forget its setting

    @cached_property
    def bpe(self) -> tokenizers.Tokenizer:
        """The library's tokenizer. It reads "<|endoftext|>" in a text as the characters that it is."""
        import tokenizers

        bpe = tokenizers.Tokenizer.from_str(self.json)
        bpe.encode_special_tokens = True
        return bpe

    @property
    def size(self) -> int:
        """How many tokens there really are: fewer than were asked for, when the text was too short for more."""
        return int(self.bpe.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without <|endoftext|> (token 0). `decode` gives the text back exactly."""
        return list(self.bpe.encode(text).ids)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The text of the tokens. Half a character becomes U+FFFD; numbers that are no token are skipped."""
        return str(self.bpe.decode([int(i) for i in ids], skip_special_tokens=False))

    def pack(self, texts: Sequence[str], dtype: str) -> NDArray[Any]:
        """One array of all tokens: the documents in their order, each closed by <|endoftext|>."""
        parts = [np.zeros(0, dtype)]
        for start in range(0, len(texts), 64):
            encodings = self.bpe.encode_batch_fast(list(texts[start : start + 64]))
            parts += [np.array([*encoding.ids, 0], dtype) for encoding in encodings]
        return np.concatenate(parts)


@dataclass(frozen=True, eq=False)
class Corpus:
    """What `prepare` returns. `train` and `held_out` are arrays of tokens, read from the cache file as needed."""

    train: NDArray[Any]
    held_out: NDArray[Any]
    statistics: Statistics
    tokenizer: Tokenizer


def prepare(
    data: str | Path | None = None,
    *,
    vocab: int = 4096,
    limit_bytes: int | None = None,
    seed: int = 0,
    cache: Path | None = None,
) -> Corpus:
    """Tokens to train on and to evaluate on, from `data` or from Python's own standard library.

    data         a file or a folder of text. A file in a folder is a document; a single file is cut at blank lines.
    vocab        size of the vocabulary, from 260. A short text may fill less of it: `statistics.vocabulary_used`.
    limit_bytes  stop reading after that many. Default: 4,000,000 of the standard library, and all of `data`.
    seed         chooses the files that are read under a limit, and the documents that are held out.
    cache        folder for the result (see above).

    The same files and numbers give the same tokens, in any process. Many processes may ask at once: one prepares, the
    others wait for it. Raises `CorpusError`, a ValueError of one line.
    """
    if vocab < SMALLEST:
        raise CorpusError(f"vocab={vocab} is too small: choose {SMALLEST} or more, for all 256 bytes and {END_OF_TEXT}")
    if vocab > LARGEST:
        raise CorpusError(f"vocab={vocab} is too large: choose {LARGEST:,} or less")
    if limit_bytes is not None and limit_bytes < 1:
        raise CorpusError(f"limit_bytes={limit_bytes} reads nothing: choose 1 or more")
    source = clean.find(data)
    limit = SAMPLE_BYTES if data is None and limit_bytes is None else limit_bytes
    name = f"corpus-{fingerprint(source, vocab, limit, seed)}.bin"
    build = lambda: make(source, vocab=vocab, limit_bytes=limit, seed=seed)
    header, (train, held_out) = cached(name, build, None if cache is None else Path(cache))
    return Corpus(train, held_out, Statistics(**header["statistics"]), Tokenizer(header["tokenizer"]))


def fingerprint(source: Source, vocab: int, limit_bytes: int | None, seed: int) -> str:
    """A name for everything that the result depends on; files count by path, size and time of change."""
    libraries = [version("tokenizers"), version("datasketch"), unicodedata.unidata_version]
    recipe = [ALGORITHM, libraries, vocab, limit_bytes, seed, str(source.root.absolute()), source.files]
    return blake2b(json.dumps(recipe).encode(), digest_size=12).hexdigest()


def documents(source: Source, *, limit_bytes: int | None, seed: int, counts: Counter[str]) -> list[str]:
    """The clean documents of the source, each told once."""
    texts = clean.clean(clean.read(source, limit_bytes=limit_bytes, seed=seed, counts=counts), counts)
    distinct = dedup.without_exact_duplicates(texts)
    unlike = dedup.without_near_duplicates(distinct)
    counts["exact duplicates"] = len(texts) - len(distinct)
    counts["near duplicates"] = len(distinct) - len(unlike)
    if len(unlike) < 2:
        lost = [f"{counts[why]:,} {why}" for why in (*REASONS, "exact duplicates", "near duplicates") if counts[why]]
        raise CorpusError(
            f"data {str(source.root)!r} leaves {len(unlike)} of the two documents needed, to train on and to hold out "
            f"(lost: {', '.join(lost) or 'none'}): give more files, or one longer text"
        )
    return unlike


def make(source: Source, *, vocab: int, limit_bytes: int | None, seed: int) -> Kept:
    """The whole preparation: statistics and tokenizer, and the two arrays of tokens."""
    counts: Counter[str] = Counter()
    texts = documents(source, limit_bytes=limit_bytes, seed=seed, counts=counts)
    train_texts, candidates = dedup.hold_out(texts, share=HELD_OUT, seed=seed)
    held_out_texts, seen = dedup.without_contaminated(candidates, train_texts)
    tokenizer = train_tokenizer(train_texts, vocab)
    dtype = "<u2" if vocab <= 2**16 else "<i4"
    train, held_out = tokenizer.pack(train_texts, dtype), tokenizer.pack(held_out_texts, dtype)
    statistics = Statistics(
        name=source.name,
        files_found=len(source.files) + source.unreadable,
        documents_found=counts["documents"] + counts["unreadable"] + counts["binary"] + counts["undecodable"],
        documents_kept=len(train_texts) + len(held_out_texts),
        bytes_read=counts["bytes read"],
        bytes_kept=sum(len(text.encode()) for text in (*train_texts, *held_out_texts)),
        dropped={reason: counts[reason] for reason in REASONS},
        declared_encoding=counts["declared"],
        repaired_encoding=counts["repaired"],
        control_characters=counts["control characters"],
        exact_duplicates=counts["exact duplicates"],
        near_duplicates=counts["near duplicates"],
        contaminated=len(candidates) - len(held_out_texts),
        held_out_seen=seen,
        documents_held_out=len(held_out_texts),
        tokens_train=len(train),
        tokens_held_out=len(held_out),
        vocabulary=vocab,
        vocabulary_used=tokenizer.size,
    )
    return {"statistics": asdict(statistics), "tokenizer": tokenizer.json}, [train, held_out]


def train_tokenizer(texts: Sequence[str], vocab: int) -> Tokenizer:
    """Byte-level BPE of at most `vocab` tokens: <|endoftext|>, the 256 bytes, then the most frequent pairs."""
    from tokenizers import Tokenizer as BPE
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = BPE(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return Tokenizer(bpe.to_str())
