"""`minipar schedule`: what it says, writes and refuses."""

from __future__ import annotations

import argparse
import io
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minipar import schedule_command
from minipar.arguments import Parser
from minipar.schedule import interleaved, one_f_one_b, zb_h1
from minipar.show import terminal
from minipar.simulate import simulate


def options(*arguments: str) -> argparse.Namespace:
    parser = Parser(prog="minipar schedule")
    schedule_command.add_arguments(parser)
    return parser.parse_args(arguments)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints when all goes well."""
    assert schedule_command.command(options(*arguments)) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def refused(*arguments: str) -> str:
    """The one line with which the command refuses."""
    with pytest.raises(ValueError) as error:
        schedule_command.command(options(*arguments))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_it_draws_a_schedule_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, "1f1b", "--stages", "4", "--micro-batches", "8")
    expected = terminal.text(simulate(one_f_one_b(4, 8)), "1F1B")
    assert printed == f"{expected}\nsends   48 messages in a step\n"
    assert max(map(len, printed.splitlines())) <= 80


def test_costs_are_those_of_all_layers_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(
        capsys, "interleaved", "--forward", "2", "--backward", "3", "--weight", "1", "--send", "0.25", "--json"
    )
    found = json.loads(printed)
    expected = simulate(interleaved(4, 8, 2), 1.0, 1.5, 0.5, 0.25)
    assert found["duration"] == expected.duration and found["bubble"] == expected.bubble


def test_json_has_all_that_was_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "zb-h1", "--stages", "3", "--micro-batches", "4", "--json"))
    order = zb_h1(3, 4)
    timeline = simulate(order)
    assert (found["schedule"], found["ranks"], found["stages"], found["micro_batches"]) == ("zb-h1", 3, 3, 4)
    assert found["actions"] == [[str(action) for action in row] for row in order.actions]
    assert found["held"] == timeline.peak_activations() and found["messages_per_step"] == 2 * 2 * 4
    assert len(found["spans"]) == len(timeline.spans)
    assert found["spans"][0] == {"rank": 0, "start": 0.0, "end": 1.0, "kind": "F", "stage": 0, "micro_batch": 0}


def test_it_compares_schedules_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--compare", "gpipe,1f1b,interleaved,zb-h1").splitlines() == [
        "4 ranks, 8 micro-batches: ZB-H1 takes 27 s, GPipe 33 s: 18.2 % less",
        "",
        "schedule                    bubble    step  held at most  messages",
        "GPipe                       37.5 %    33 s             8        48",
        "1F1B                        37.5 %    33 s             4        48",
        "Interleaved 1F1B, 2 chunks  18.8 %  28.5 s           5.5       112",
        "ZB-H1                       12.5 %    27 s             4        48",
        "bubble: idle / busy time. held: micro-batches of a rank's layers. ",
    ]


def test_a_comparison_as_json_has_an_entry_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "--compare", "gpipe, 1f1b", "--json", "--micro-batches", "16"))
    assert [(one["schedule"], one["bubble"]) for one in found] == [("gpipe", 3 / 16), ("1f1b", 3 / 16)]
    two = json.loads(run(capsys, "--compare", "1f1b,interleaved", "--json", "--chunks", "4"))
    assert [one["chunks"] for one in two] == [1, 4]


def test_it_draws_what_a_student_has_typed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("\ufeffrank 0  F0 F1 .  .  B0 B1   # mine\nrank 1  .  F0 B0 F1 B1\n")
    printed = run(capsys, "--file", str(file))
    assert printed.startswith("mine, 2 stages, 2 micro-batches: idle 50 % of busy time\nrank 0  F0")


def test_a_typed_schedule_is_read_from_the_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"F0 B0\nF0 B0\n")))
    assert run(capsys, "--file", "-").startswith("typed, 2 stages, 1 micro-batch: ")


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("rank 0 F0 Bx\nrank 1 F0 B0", ["row 1 (rank 0), cell 2: 'Bx' is not an action"]),
        ("F0 F1 B0 B1\nF0 F1 B0 B0", ["B0 of stage 1 stands 2 times on rank 1", "B1 of stage 1 missing on rank 1"]),
        ("B0 F0\nF0 B0", ["B0 of stage 0 comes before F0 of stage 0"]),
        ("F0 B0 F1 B1\nF0 F1 B0 B1", ["deadlock", "rank 0 waits for"]),
        ("", ["there is no row"]),
    ],
)
def test_faults_of_a_typed_schedule_are_told_one_a_line(
    text: str, faults: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(text)
    assert schedule_command.command(options("--file", str(file), "--svg", str(tmp_path / "a.svg"))) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("minipar schedule: ")
    lines = printed.err.splitlines()
    for fault in faults:
        assert any(fault in line for line in lines), printed.err
    assert not (tmp_path / "a.svg").exists()


def test_pictures_are_written_where_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg, png, html = (str(tmp_path / f"a.{ending}") for ending in ("svg", "png", "html"))
    printed = run(capsys, "1f1b", "--svg", svg, "--png", png, "--html", html)
    assert printed.endswith(f"written: {svg}\nwritten: {png}\nwritten: {html}\n")
    assert ET.parse(svg).getroot().get("aria-label") == "1F1B, 4 stages, 8 micro-batches: idle 37.5 % of busy time"
    assert Path(png).read_bytes()[:4] == b"\x89PNG"
    assert "minipar-player" in Path(html).read_text()
    run(capsys, "--compare", "gpipe,zb-h1", "--svg", svg, "--html", html)
    assert "ZB-H1 takes 27 s, GPipe 33 s" in Path(svg).read_text() and "<svg" in Path(html).read_text()
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("ending", ["svg", "png", "html"])
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    ending: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(schedule_command, "asked", lambda options: pytest.fail("too late"))
    assert "cannot write" in refused("1f1b", f"--{ending}", str(tmp_path / "nowhere" / "a"))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "nothing to draw: name a schedule"),
        (["1f1b", "--compare", "gpipe"], "more than one thing"),
        (["pipe"], "unknown schedule 'pipe': choose from naive, gpipe, 1f1b"),
        (["--compare", "gpipe,nope"], "unknown schedule 'nope'"),
        (["--compare", ","], "names no schedule"),
        (["1f1b", "--chunks", "2"], "choose interleaved"),
        (["interleaved", "--micro-batches", "6"], "choose 4 or 8 micro-batches"),
        (["--file", "/does/not/exist"], "cannot read '/does/not/exist' (No such file or directory)"),
        (["--file", "/"], "cannot read '/' (Is a directory)"),
        (["--file", "\0"], "cannot read"),
        (["--file", "/dev/zero"], "has more than 1.05 MB"),
        (["1f1b", "--svg", "x.png"], "'x.png' does not end in .svg"),
        (["1f1b", "--html", "x"], "'x' does not end in .html"),
        (["--file", "x", "--stages", "3"], "--stages 3 with --file"),
        (["1f1b", "--stages", "1000", "--micro-batches", "100000"], "choose fewer micro-batches"),
        (["1f1b", "--forward", "0", "--backward", "0", "--weight", "0"], "are all 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(arguments: list[str], why: str) -> None:
    assert why in refused(*arguments)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\xff\xfe")
    assert "is no text" in refused("--file", str(tmp_path / "a.png"))


@pytest.mark.parametrize(
    "arguments", [["1f1b", "--stages", "0"], ["1f1b", "--forward", "-1"], ["1f1b", "--send", "nan"], ["--nope"]]
)
def test_numbers_out_of_range_end_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        options(*arguments)
    assert end.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_terminal_gets_colours_and_its_own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    one = schedule_command.run(zb_h1(4, 8), options("zb-h1"))
    coloured: Any = schedule_command.coloured(one, 120)
    assert "\n".join(coloured.plain.splitlines()[:-1]) == terminal.text(one.timeline, one.name, 120)
    styled = [coloured.plain[span.start : span.end] for span in coloured.spans if span.style]
    assert {text[0] for text in styled} == {"F", "B", "W"} and len(styled) == 3 * 4 * 8


def test_a_large_schedule_is_drawn_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, "zb-h1", "--stages", "32", "--micro-batches", "256")
    assert "too long for numbers" in printed and max(map(len, printed.splitlines())) <= 80
