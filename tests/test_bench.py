"""The benchmark compares what is equal, and says all that it should: whether it is fast is not asked here."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import minipar
from minipar import bench, peers
from minipar.model import GPTConfig

TINY = bench.Settings(
    model=GPTConfig(layers=4, hidden=32, heads=4, vocab=96, sequence=16), batch=8, micro_batches=4, pairs=2
)
KEYS = {"work", "peer", "ranks", "ratio", "goal", "met", "milliseconds", "peer_milliseconds"}
MORE = {"efficiency", "peak_mb", "peer_peak_mb", "loss_difference", "recording_share", "pairs", "ratio_quartiles"}

each_work = pytest.mark.parametrize("work", bench.WORKS, ids=lambda work: f"{work.name} {work.ranks}".replace(" ", "-"))


def losses(mesh: Any, work: peers.Work) -> bench.Laps:
    return bench.race(mesh, work, replace(TINY, pairs=1))


@each_work
def test_both_sides_compute_the_same_losses(work: peers.Work) -> None:
    laps = minipar.run(losses, work.mesh, work, backend="gloo")
    assert len(laps) == work.ranks and not laps[0].missing
    assert bench.loss_difference(laps) < bench.SAME
    first, *_, last = laps[0].losses
    assert first != last  # the batches and the weights change


def test_another_loss_is_found() -> None:
    """A peer that learns at another rate gives the same first loss, and other ones from then on."""

    def other(mesh: Any, config: Any) -> peers.Step:
        return peers.ddp(mesh, replace(config, lr=2 * config.lr))

    row = bench.compare(replace(bench.WORKS[0], build=other), TINY)
    assert isinstance(row, str) and "computes another loss" in row


def test_a_missing_peer_is_skipped_with_the_reason() -> None:
    def missing(mesh: Any, config: Any) -> peers.Step:
        raise ImportError("No module named 'torch.distributed.nothing'")

    said: list[str] = []
    result = bench.run_bench(TINY, [replace(bench.WORKS[0], build=missing)], show=said.append, start=False)
    assert result.rows == [] and "torch.distributed.nothing" in result.skipped["dp on 2 ranks"]
    assert "skipped" in said[1]


def test_the_table_and_the_report_say_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "Settings", lambda: TINY)
    monkeypatch.setattr(bench, "start_seconds", lambda: 0.125)
    file = tmp_path / "bench.json"
    assert bench.command(Namespace(only="tp", pairs=3, report=str(file), json=False)) == 0
    (row,) = json.loads(file.read_text())
    assert row.keys() >= KEYS | MORE
    assert (row["work"], row["ranks"], row["goal"], row["pairs"]) == ("tp", 2, 0.8, 3)
    assert row["met"] == (row["ratio"] <= 0.8) and row["peak_mb"] > 0 and row["peer_peak_mb"] > 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "parallelize_module" in shown and "0.12 s" in shown and f"{row['ratio']:.3f}" in shown
    assert ("Short of the goal: tp" in shown) == (not row["met"])


def test_json_prints_rows_and_nothing_else(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "run_bench", lambda *args, **kwargs: bench.Bench([{"ratio": 1.0, "goal": 1.0}]))
    assert bench.command(Namespace(only=None, pairs=None, report=None, json=True)) == 0
    assert json.loads(capsys.readouterr().out) == [{"ratio": 1.0, "goal": 1.0}]


def test_works_are_chosen_by_name_or_first_word() -> None:
    name = lambda only: [f"{work.name} {work.ranks}" for work in bench.chosen(only)]
    assert len(name(None)) == 9
    assert name("tp, dp") == ["dp 2", "tp 2"]
    assert name("pp") == ["pp gpipe 2", "pp 1f1b 2", "pp gpipe 4", "pp 1f1b 4"]
    assert name("pp-gpipe") == name("pp gpipe") == ["pp gpipe 2", "pp gpipe 4"]
    with pytest.raises(ValueError, match="unknown work 'ddp': choose from dp, pp, "):
        bench.chosen("ddp")


def test_what_cannot_run_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cannot write"):
        bench.command(Namespace(only="dp", pairs=2, report="/no/such/folder/x.json", json=False))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(ValueError, match="without torchrun"):
        bench.command(Namespace(only="dp", pairs=2, report=None, json=False))


def test_the_median_of_ratios_is_taken_over_the_slowest_rank() -> None:
    """Two ranks, three pairs: ratios 4/2, 3/3 and 6/4."""
    laps = [
        bench.Laps(seconds=[4.0, 1.0, 6.0], peer_seconds=[2.0, 3.0, 1.0], alone_seconds={0: 4.0, 2: 9.0}),
        bench.Laps(seconds=[1.0, 3.0, 2.0], peer_seconds=[1.0, 1.0, 4.0]),
    ]
    row = bench.figures(bench.WORKS[0], laps)
    assert (row["ratio"], row["milliseconds"], row["peer_milliseconds"]) == (1.5, 4000.0, 3000.0)
    assert row["efficiency"] == pytest.approx((4 / 8 + 9 / 12) / 2) and not row["met"]
