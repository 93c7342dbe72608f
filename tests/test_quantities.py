"""Sizes as people write them, and what is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minipar import quantities
from minipar.show import units


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7B", 7e9), ("7e9", 7e9), ("7 b", 7e9), ("70e9", 70e9), ("1T", 1e12), ("1.5T", 1.5e12), ("300B", 300e9),
        ("124M", 124e6), ("51,200", 51200), ("2k", 2000), ("1.5 billion", 1.5e9), ("15 trillion", 15e12),
        ("1_000", 1000),
        ("4096", 4096), (".5B", 5e8), ("+3", 3),
    ],
)  # fmt: skip
def test_amounts(text: str, value: float) -> None:
    assert quantities.count(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("400Gb/s", 50e9), ("400gbit", 50e9), ("400 Gbit/s", 50e9), ("400Gbps", 50e9), ("50GB/s", 50e9), ("50e9", 50e9),
        ("900 GB/s", 900e9), ("1gbit", 0.125e9), ("200mbit", 25e6), ("1.6Tb/s", 200e9), ("3.35TB/s", 3.35e12),
    ],
)  # fmt: skip
def test_rates_in_bits_and_in_bytes(text: str, value: float) -> None:
    assert quantities.rate(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (quantities.size, "80GB", 80e9), (quantities.size, "80 GiB", 80 * 2**30), (quantities.size, "141gb", 141e9),
        (quantities.size, "16e9", 16e9), (quantities.size, "512 MiB", 2**29), (quantities.size, "1TB", 1e12),
        (quantities.speed, "1e18", 1e18), (quantities.speed, "312TFLOP/s", 312e12),
        (quantities.speed, "1 EFLOPS", 1e18), (quantities.speed, "989.4 tflops", 989.4e12),
        (quantities.duration, "30s", 30), (quantities.duration, "5 min", 300),
        (quantities.duration, "3h", 10800), (quantities.duration, "2 days", 172800), (quantities.duration, "90", 90),
        (quantities.duration, "14us", 14e-6), (quantities.duration, "50ms", 0.05),
    ],
)  # fmt: skip
def test_bytes_speeds_and_times(read: Callable[[str], float], text: str, value: float) -> None:
    assert read(text) == pytest.approx(value, rel=1e-12)


READERS = (quantities.count, quantities.size, quantities.rate, quantities.speed, quantities.duration)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "-7B", "1e999"])
@pytest.mark.parametrize("read", READERS)
def test_nothing_negative_and_nothing_without_end_is_an_amount(read: Callable[[str], float], text: str) -> None:
    with pytest.raises(ValueError, match="is no ") as told:
        read(text.removesuffix("B"))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("text", ["", " ", "seven", "7Q", "7 B B", "1/2", "7B parameters, please", "e9", "0x10", "--"])
@pytest.mark.parametrize("read", READERS)
def test_what_is_no_amount_is_told_what_one_looks_like(read: Callable[[str], float], text: str) -> None:
    with pytest.raises(ValueError, match=r"is no .*(write|give) ") as told:
        read(text)
    assert repr(text) in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize("value", [7e9, 1.5e12, 124e6, 51200.0, 405e9])
def test_what_is_printed_is_read_again(value: float) -> None:
    assert quantities.count(units.amount(value)) == pytest.approx(value, rel=5e-3)
