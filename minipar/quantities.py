"""Sizes as people write them: 7B parameters, 1T tokens, 400Gb/s, 80GB, 3h.

Idea    An account is asked for in the words of a datasheet or of a paper, so these are read as they stand: a number, a
        prefix, a unit. Prefixes are powers of 1000 (k, M, G or B, T, P, E); Ki, Mi, Gi, Ti are powers of 1024. In a
        rate a small b is bits, a capital B bytes: 400Gb/s is 50GB/s.
Read    `catalogue.py`, whose names take the place of numbers; `show/units.py` for the way back.
"""

from __future__ import annotations

import re
from math import isfinite

PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15, "e": 1e18, "z": 1e21}
BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
WORDS = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "day": 86_400.0, "days": 86_400.0}
NUMBER = r"\s*([-+]?(?:\d[\d_,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf))\s*"


def count(text: str) -> float:
    """'7B', '7e9', '1T', '1.5 billion', '51,200': how many. Raises `ValueError`, one line, for anything else."""
    found = re.fullmatch(rf"{NUMBER}([kmgbtpe]|{'|'.join(WORDS)})?\s*", text, re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is no amount: write a number such as 7B, 7e9 or 1.5T")
    return _checked(text, found[1]) * (PREFIXES | WORDS)[(found[2] or "").lower()]


def size(text: str) -> float:
    """'80GB', '141 GiB', '16e9': bytes."""
    found = re.fullmatch(NUMBER + r"(?:(ki|mi|gi|ti|k|m|g|t|p)?B(?:ytes?)?)?\s*", text, re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is no size: write bytes such as 80GB, 141GiB or 80e9")
    prefix = (found[2] or "").lower()
    return _checked(text, found[1]) * (BINARY | PREFIXES)[prefix]


def rate(text: str) -> float:
    """'400Gb/s', '400gbit', '900 GB/s', '50e9': bytes a second."""
    found = re.fullmatch(NUMBER + r"(?:([kKmMgGtT])?(?:(b|[bB]its?)(?:/s|ps)?|(B|[bB]ytes?)(?:/s|ps)))?\s*", text)
    if not found:
        raise ValueError(f"{text!r} is no rate: write 400Gb/s (bits), 50GB/s (bytes) or 50e9 (bytes a second)")
    return _checked(text, found[1]) * PREFIXES[(found[2] or "").lower()] / (8 if found[3] else 1)


def speed(text: str) -> float:
    """'1e18', '312 TFLOP/s', '1 EFLOPS': FLOP a second."""
    found = re.fullmatch(NUMBER + r"(k|m|g|t|p|e|z)?(?:flops?(?:/s)?)?\s*", text, re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is no speed: write FLOP/s such as 989TFLOP/s, 1EFLOP/s or 1e18")
    return _checked(text, found[1]) * PREFIXES[(found[2] or "").lower()]


def duration(text: str) -> float:
    """'30s', '5 min', '3h', '2 days', '90': seconds."""
    found = re.fullmatch(NUMBER + rf"({'|'.join(sorted(TIMES, key=len, reverse=True))})?\s*", text, re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is no time: write 30s, 5min, 3h or 2days")
    return _checked(text, found[1]) * TIMES[(found[2] or "s").lower()]


def _checked(text: str, number: str) -> float:
    value = float(number.replace(",", "").replace("_", ""))
    if not (isfinite(value) and value > 0):
        raise ValueError(f"{text!r} is no amount: give a finite number above 0")
    return value
