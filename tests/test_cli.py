"""The command line: what is refused and how, what is printed where, and what is written."""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minipar import cli, files

ROOT = Path(cli.__file__).parents[1]
TEXT = argparse.__file__  # a hundred thousand characters that every Python has
SIZES = "--layers 2 --hidden 16 --heads 2 --vocab 300 --sequence 16 --global-batch 8 --micro-batches 2 --steps 3"
SMALL = [*SIZES.split(), "--data", TEXT]
ESCAPE = "\x1b"

Train = Callable[..., str]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for all tests here, and not the user's."""
    monkeypatch.setenv("MINIPAR_CACHE", str(tmp_path_factory.getbasetemp() / "minipar cache"))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def environment(**changes: str) -> dict[str, str]:
    """That of the tests, without what would change colours and widths."""
    unwanted = ("COLUMNS", "FORCE_COLOR", "NO_COLOR")
    return {name: value for name, value in os.environ.items() if name not in unwanted} | changes


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """`minipar` in a process of its own."""
    command = [sys.executable, "-m", "minipar", *arguments]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **streams | {"env": environment()} | options)


# Help.


def test_the_command_line_is_read_without_torch() -> None:
    """Help and accounts answer at once."""
    code = "import sys; from minipar.cli import build_parser; build_parser(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", ["", "train", "verify", "bench", "schedule", "links", "ledger", "plan", "doctor"])
def test_every_command_has_help(run: Any, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(*command.split(), "--help")
    assert code == 0 and out.startswith(f"usage: minipar {command}".rstrip()) and not err
    assert max(map(len, out.splitlines())) <= 80


def test_the_version_is_told(run: Any) -> None:
    code, out, _ = run("--version")
    assert code == 0 and re.fullmatch(r"minipar \d+\.\d+\.\d+\n", out)


# What cannot run is refused: one line, with the numbers and the way out, exit code 2, and nothing is written.


REFUSED = [
    ("--dp 0", "--dp", "0", "choose from 1"),
    ("--dp -2", "--dp", "-2", "choose from 1"),
    ("--tp 1.5", "--tp", "1.5", "whole number"),
    ("--pp nan", "--pp", "nan", "whole number"),
    ("--lr nan", "--lr", "nan", "choose from 0"),
    ("--lr inf", "--lr", "inf", "choose from 0"),
    ("--lr -1", "--lr", "-1", "choose from 0"),
    ("--lr 0", "lr 0", "above 0"),
    ("--clip -0.5", "--clip", "-0.5", "choose from 0"),
    ("--dropout 1", "dropout", "1", "not including"),
    ("--dropout nan", "--dropout", "nan"),
    ("--steps 0", "--steps", "0", "choose from 1"),
    ("--steps 1e3", "--steps", "1e3", "whole number"),
    ("--steps 99999999999999999999", "--steps", "to 2,147,483,647"),
    (f"--hidden {'9' * 5000}", "--hidden", "999...", "whole number"),
    ("--seed -1", "--seed", "-1", "choose from 0"),
    ("--global-batch 0", "--global-batch", "0", "choose from 1"),
    ("--dp 3", "8 rows", "dp=3", "such as 9"),
    ("--dp 2 --micro-batches 3", "4 rows", "3 micro-batches", "choose from 1, 2, 4"),
    ("--heads 3", "hidden=16", "3 heads", "choose"),
    ("--heads 2 --tp 4", "2 heads", "tp=4", "choose tp from 1, 2"),
    ("--kv-heads 3", "2 heads", "3 key/value heads"),
    ("--pp 3", "2 layers", "3 stages", "at most 2 stages"),
    ("--layers 10000000", "--layers", "to 100,000"),
    ("--sequence 15 --tp 2 --sequence-parallel", "15 positions", "tp=2", "choose tp from 1"),
    ("--schedule pipedream", "'pipedream'", "choose from", "1f1b", "zb-h1"),
    ("--schedule 1f1b --chunks 2 --pp 1", "2 chunks", "choose interleaved"),
    ("--schedule interleaved --chunks 2 --pp 2 --layers 4 --micro-batches 1", "1 micro-batches", "choose"),
    ("--schedule interleaved --chunks 3 --pp 2", "2 layers", "6 stages"),
    ("--precision fp8", "'fp8'", "choose from", "fp32"),
    ("--backend mpi", "'mpi'", "choose gloo"),
    ("--zero 4", "4", "choose 0 (off), 1, 2 or 3"),
    ("--zero -1", "--zero", "-1"),
    ("--vocab 5", "vocab=5", "choose 260"),
    ("--vocab 2000000", "vocab=2000000", "choose"),
    ("--sequence 100000", "100000", "choose a shorter sequence or more text"),
    ("--dp 1000000 --global-batch 1000000", "1000000 ranks", "GB", "fewer ranks"),
    ("--hidden 1000000", "GB", "choose a smaller model"),
    ("--micro-batches 1 --global-batch 1000000 --sequence 4096", "GB", "more micro-batches"),
    ("--data missing", "'missing' does not exist", "give a file or folder"),
    ("--data empty", "'empty'", "lost: 1 too short", "give more files"),
    ("--data binary", "'binary'", "lost: 1 binary", "give more files"),
    ("--data folder", "'folder' holds no files"),
    ("--data loop", "'loop' cannot be read"),
    ("--data pipe", "'pipe' is neither a file nor a folder"),
    ("--report missing/r.json", "cannot write 'missing/r.json'", "No such file", "name a file"),
    ("--report empty/r.json", "cannot write 'empty/r.json'", "Not a directory"),
    ("--report folder", "'folder'", "it is a folder"),
    (f"--report {'a' * 300}", "File name too long"),
    ("--picture r.gif", "r.gif", ".svg"),
    ("--picture missing/r.svg", "missing/r.svg", "No such file"),
    ("--trace folder", "'folder'", "it is a folder"),
    ("--report r.json --trace ./r.json", "--report and --trace both name './r.json'", "a file of its own"),
    ("--save-every 2", "--save-every 2", "add --save"),
    ("--save empty", "empty"),
    ("--resume folder", "folder"),
    ("--resume missing", "missing"),
    ("surplus", "surplus"),
    ("--frobnicate 3", "--frobnicate"),
    ("--dp", "--dp", "expected one argument"),
]


@pytest.fixture
def odd_things(tmp_path: Path) -> None:
    """Files and folders that are no text, or cannot be written to."""
    (tmp_path / "r.json").write_text("before")
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")


@pytest.mark.parametrize(("options", "words"), [(first, rest) for first, *rest in REFUSED], ids=lambda p: str(p)[:40])
def test_bad_input_is_one_line_that_says_the_way_out(
    run: Any, odd_things: None, tmp_path: Path, options: str, words: list[str]
) -> None:
    before = sorted(path.name for path in tmp_path.rglob("*"))
    code, out, err = run("train", *SMALL, "--report", "r.json", *options.split())
    assert code == 2 and out == ""
    assert err.startswith("minipar") and err.count("\n") == 1 and err.endswith("\n")
    assert [word for word in words if word not in err] == []
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert (tmp_path / "r.json").read_text() == "before"


def test_empty_names_are_refused(run: Any) -> None:
    for option in ("--data", "--report", "--trace", "--picture", "--save", "--resume", "--schedule", "--precision"):
        code, out, err = run("train", *SMALL, option, "")
        assert (code, out, err.count("\n")) == (2, "", 1) and "''" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_what_may_not_be_read_or_written_is_refused(run: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a text")
    (tmp_path / "secret").chmod(0)
    assert "'secret' cannot be read" in run("train", *SMALL, "--data", "secret")[2]
    assert "cannot write 'secret' (no permission)" in run("train", *SMALL, "--report", "secret")[2]


def test_a_wrong_command_is_one_line(run: Any) -> None:
    for arguments in ("", "dance", "verify --fuzz 0", "bench --only lunch", "schedule waltz", "doctor now"):
        code, out, err = run(*arguments.split())
        assert (code, out, err.count("\n")) == (2, "", 1), arguments


# What is printed.


def test_the_report_as_json_is_all_that_is_printed(run: Any) -> None:
    code, out, err = run("train", *SMALL, "--dp", "2", "--json")
    assert code == 0 and err == "" and out.count("\n") == 1
    assert len(json.loads(out)["losses"]) == 3


def test_a_run_from_a_folder_with_a_difficult_name(tmp_path: Path) -> None:
    """The package too lies in it, and the text; the output is a file, of at most 80 columns and without escapes."""
    place = tmp_path / "ein Ordner, schön 数据"
    shutil.copytree(ROOT / "minipar", place / "minipar", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TEXT, place / "der Text 文本.txt")
    options = [*SMALL[:-1], "der Text 文本.txt", "--report", "Bericht ü.json", "--dp", "2", "--pp", "2"]
    with open(place / "out", "w") as out:
        changes = {"TERM": "dumb", "COLUMNS": "80", "LC_ALL": "C", "PYTHONUTF8": "0"}
        process = start("train", *options, cwd=place, stdout=out, env=environment(**changes))
        assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 0
    told = (place / "out").read_text(errors="replace")
    assert "step    3/3" in told and ESCAPE not in told and max(map(len, told.splitlines())) <= 80
    assert json.loads((place / "Bericht ü.json").read_text())["world_size"] == 4


def test_output_that_nobody_reads_on_ends_the_run_quietly() -> None:
    with start("train", *SMALL, "--steps", "100000") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("files found")
        process.stdout.close()
        assert process.wait(timeout=120) == 1
        assert process.stderr.read() == ""


def test_a_run_without_any_output(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "minipar", "train", *SMALL, "--report", str(tmp_path / "r.json")]
    done = subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command], env=environment(), timeout=120)
    assert done.returncode == 0
    assert len(json.loads((tmp_path / "r.json").read_text())["losses"]) == 3


def in_terminal(kind: str) -> str:
    """What a run shows on a terminal of 80 columns."""
    controller, terminal = pty.openpty()
    changes = environment(TERM=kind, COLUMNS="80", LINES="30")
    process = start("train", *SMALL, stdin=terminal, stdout=terminal, stderr=terminal, env=changes)
    os.close(terminal)
    seen = b""
    try:
        while piece := os.read(controller, 1 << 16):
            seen += piece
    except OSError:  # how a terminal says that its last writer has gone
        pass
    os.close(controller)
    assert process.wait(timeout=60) == 0
    return seen.decode()


def test_a_terminal_shows_a_progress_bar() -> None:
    seen = in_terminal("xterm-256color")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert "3/3 ━━━━━━━━━━━━━━━━ loss" in plain
    assert max(len(line) for line in re.split(r"[\r\n]+", plain)) <= 80


def test_a_dumb_terminal_shows_lines() -> None:
    seen = in_terminal("dumb")
    assert "step    3/3" in seen and "━" not in seen and ESCAPE not in seen


# What is written.


def test_a_report_replaces_a_file_whole_and_leaves_links_and_pipes(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("before")
    (tmp_path / "link").symlink_to("real")
    files.write_whole("link", "after")
    assert (tmp_path / "real").read_text() == "after" and (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    files.check_writable("pipe")
    writer = threading.Thread(target=files.write_whole, args=("pipe", "through"))
    writer.start()
    assert (tmp_path / "pipe").read_text() == "through" and (tmp_path / "pipe").is_fifo()
    writer.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "real"]


def test_a_link_that_leads_back_to_itself_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    with pytest.raises(ValueError, match="a link that leads back to itself"):
        files.check_writable("one")
    assert (tmp_path / "one").is_symlink()


def test_a_device_is_written_and_not_replaced() -> None:
    """As root, to rename a file over /dev/null is possible, and a disaster."""
    for path in ("/dev/null", "/dev/stdout"):
        assert files.written_in_place(path)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("before")
    with pytest.raises(UnicodeEncodeError):
        files.write_whole("r.json", "half\ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert (tmp_path / "r.json").read_text() == "before"


def test_a_report_is_json_for_everybody_even_when_the_run_diverged() -> None:
    report = {"losses": [1.5, float("nan")], "steps": (float("inf"), 2)}
    assert files.as_json(report) == '{"losses": [1.5, null], "steps": [null, 2]}\n'


# The other commands.


def test_verify_tells_and_reports_each_topology(run: Any, tmp_path: Path) -> None:
    code, out, err = run("verify", "--fuzz", "1", "--ranks", "2", "--report", "v.json")
    rows = json.loads((tmp_path / "v.json").read_text())
    assert code == 0 and err == "" and "all equal" in out
    assert [row["equal"] for row in rows] == [True]


def test_doctor_finds_that_the_main_job_can_run(run: Any) -> None:
    code, out, err = run("doctor")
    lines = out.splitlines()
    assert code == 0 and err == "" and max(map(len, lines)) <= 80
    for check in ("torch", "cores", "memory", "8 gloo ranks", "all_reduce", "3D training", "GPUs", "cache", "Jupyter"):
        assert any(line.startswith(check) for line in lines), check
    assert lines[-1] == "The main job can run: minipar train"


def test_doctor_says_no_and_what_to_do(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from minipar import doctor, launch

    def broken() -> Any:
        raise RuntimeError("ranks cannot talk: allow loopback\nand a traceback")

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.hardware))
    monkeypatch.setattr(launch, "RANK_BYTES", 1e15)
    code, out, _ = run("doctor")
    assert code == 1
    assert re.search(r"broken +failed +no +ranks cannot talk: allow loopback *\n", out)
    assert re.search(r"memory .*no +close other programs", out)
    assert "traceback" not in out
