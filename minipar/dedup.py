"""What documents have in common: remove the copies, and keep what is held out unknown to training.

Idea    Text repeats itself, and a model learns by heart what it reads often. Equal documents are found by a hash.
        Nearly equal ones by their shingles, the sets of five words in a row: documents are near-duplicates when their
        sets share 70 % (Jaccard similarity). Last, a held-out document that training knows measures memory, not
        learning: it is removed when more than a tenth of its 13 words in a row stand in the training text as well.

Source  Near-duplicates: Broder 1997, 'On the Resemblance and Containment of Documents' (MinHash). Why it matters: Lee
        et al. 2022, 'Deduplicating Training Data Makes Language Models Better'. Contamination: Brown et al. 2020
        (GPT-3), appendix C; there one shared 13-gram is enough, and those in more than ten documents do not count.
Cost    To compare all pairs would be quadratic. MinHash and its buckets (LSH) are linear: about 0.2 seconds per
        megabyte on one core, and as much again for the 13-grams.
Read    `clean.py` before, `corpus.py` after.

The search is datasketch's: pure Python over numpy, so it installs on every interpreter and platform and gives the
same answer there.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from hashlib import blake2b

from minipar.clean import draw

ALIKE = 0.7  # Jaccard similarity from which two documents are near-duplicates
SHINGLE, GRAM = 5, 13  # words in a row
MOST_SEEN = 0.1  # share of a held-out document's 13-grams that training may contain
BANDS, ROWS = 25, 5  # of MinHash values: see `without_near_duplicates`
WORD = re.compile("[\u3040-\u30ff\u4e00-\u9fff]|[^\\W\u3040-\u30ff\u4e00-\u9fff]+")  # a Chinese character is a word


def ngrams(text: str, n: int) -> set[str]:
    """All runs of `n` words. A shorter text is one run; a text without words has none."""
    words = WORD.findall(text)
    return {" ".join(words[i : i + n]) for i in range(max(1, len(words) - n + 1))} if words else set()


def jaccard(left: set[str], right: set[str]) -> float:
    """Size of the intersection over size of the union: 1 for equal sets, 0 for disjoint or empty ones."""
    return len(left & right) / max(1, len(left | right))


def without_exact_duplicates(texts: Sequence[str]) -> list[str]:
    """The first of each group of equal texts."""
    first: dict[bytes, str] = {}
    for text in texts:
        first.setdefault(blake2b(text.encode()).digest(), text)
    return list(first.values())


def without_near_duplicates(texts: Sequence[str]) -> list[str]:
    """The texts, without those that are `ALIKE` an earlier one that was kept.

    MinHash proposes, the sets themselves decide. With 25 bands of 5 values, two texts of similarity s meet in a bucket
    with probability 1 - (1 - s^5)^25: 99 % at 0.7, 99.99 % at 0.8, 6 % at 0.3. So no text is removed by mistake, and
    of the pairs right at the threshold one in a hundred stays.
    """
    from datasketch import MinHash, MinHashLSH  # type: ignore[import-untyped]

    index = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
    empty = MinHash(num_perm=BANDS * ROWS, seed=1, hashfunc=zlib.crc32)
    kept: list[str] = []
    for text in texts:
        shingles = ngrams(text, SHINGLE)
        sketch = empty.copy()
        sketch.update_batch([shingle.encode() for shingle in shingles])
        if all(jaccard(shingles, ngrams(kept[other], SHINGLE)) < ALIKE for other in index.query(sketch)):
            index.insert(len(kept), sketch)
            kept.append(text)
    return kept


def hold_out(texts: Sequence[str], *, share: float, seed: int) -> tuple[list[str], list[str]]:
    """Training and held-out documents: a text is held out when the number drawn from it is below `share`.

    So a text stays on its side when others come and go. Of two texts or more, each side gets one at least.
    """
    ranked = sorted(texts, key=lambda text: draw(text.encode(), seed))
    below = sum(draw(text.encode(), seed) < share for text in ranked)
    held_out = ranked[: min(max(1, below), len(ranked) - 1)]
    chosen = set(held_out)
    return [text for text in texts if text not in chosen], held_out


def seen_grams(held_out: Sequence[str], training: Sequence[str]) -> list[tuple[int, int]]:
    """For each held-out text: how many of its 13-grams stand in the training texts, too, and how many it has."""
    grams = [ngrams(text, GRAM) for text in held_out]
    asked: set[str] = set().union(*grams)
    seen: set[str] = set()
    for text in training:
        seen |= asked & ngrams(text, GRAM)
    return [(len(own & seen), len(own)) for own in grams]


def without_contaminated(held_out: Sequence[str], training: Sequence[str]) -> tuple[list[str], float]:
    """The held-out texts that training does not know, and the share of their 13-grams that it still does.

    Where training knows them all, the least known one stays, for there must be something to evaluate on; the share
    then says what that is worth.
    """
    counts = seen_grams(held_out, training)
    known = [seen / max(1, total) for seen, total in counts]
    kept = [i for i, share in enumerate(known) if share <= MOST_SEEN] or [known.index(min(known))]
    return [held_out[i] for i in kept], sum(counts[i][0] for i in kept) / max(1, sum(counts[i][1] for i in kept))
