"""A training job on real ranks: what its report says, how it ends when it is stopped, and the same under torchrun."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import pytest

from minipar import cli

SIZES = "--layers 2 --hidden 16 --heads 2 --vocab 300 --sequence 16 --global-batch 8 --micro-batches 2 --lr 0.01"
SMALL = [*SIZES.split(), "--data", argparse.__file__]  # a text that every Python has
CUBE = ["--dp", "2", "--pp", "2", "--tp", "2"]
MINIPAR = [sys.executable, "-m", "minipar", "train", *SMALL]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ACCOUNTS = ("parameters", "gradients", "optimizer", "activations_peak")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for all tests here, and not the user's."""
    monkeypatch.setenv("MINIPAR_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


# What the ranks tell.


def test_lines_that_arrive_together_are_each_heard(capsys: pytest.CaptureFixture[str]) -> None:
    """Events, what was printed between them, an event behind a line without end, and half an event."""
    from minipar.job import EVENT, _hear

    heard: list[Any] = []
    event = lambda number: f'{EVENT}{{"event": "step", "step": {number}}}'
    lines = [event(1), event(2), "hello", "", "no end" + event(3), EVENT + '{"event": "st', EVENT + "7"]
    _hear("stdout", "".join(f"[rank 0] {line}\n" for line in lines), heard.append)
    assert [one["step"] for one in heard] == [1, 2, 3]
    half = [f"[rank 0] {line}" for line in lines[-2:]]
    assert capsys.readouterr().out.split("\n") == ["[rank 0] hello", "[rank 0] ", "[rank 0] no end", *half, ""]


def test_a_launcher_that_was_stopped_for_a_while_hears_all_steps(tmp_path: Path) -> None:
    """As by Ctrl-Z and fg: the events of several steps wait for it."""
    asked = [*MINIPAR, "--dp", "2", "--steps", "60", "--report", str(tmp_path / "r.json")]
    run = subprocess.Popen(asked, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    while "step" not in run.stdout.readline().split():
        pass
    run.send_signal(signal.SIGSTOP)
    sleep(1.0)
    run.send_signal(signal.SIGCONT)
    assert "loss" in run.communicate(timeout=60)[0] and run.returncode == 0
    assert len(json.loads((tmp_path / "r.json").read_text())["losses"]) == 60


# The report.


def report(folder: Path, *options: str) -> dict[str, Any]:
    """The report of a run in this process, on ranks of its own."""
    file = folder / "r.json"
    with pytest.raises(SystemExit) as end:
        cli.main(["train", *SMALL, "--report", str(file), *options])
    assert end.value.code == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def check_accounts(found: dict[str, Any]) -> None:
    """Bytes sent are those predicted, on every rank; bytes held are, but for Adam's counters and ZeRO's padding."""
    assert found["communication"]
    for row in found["communication"]:
        assert row["bytes_per_step"] == row["predicted_bytes_per_step"], row
        assert [one["bytes"] for one in row["by_rank"]] == [one["predicted"] for one in row["by_rank"]], row
        assert len(row["by_rank"]) == found["world_size"]
    assert [row["rank"] for row in found["memory"]] == list(range(found["world_size"]))
    for row in found["memory"]:
        for account in ACCOUNTS:
            assert row[account] == pytest.approx(row["predicted"][account], rel=0.01, abs=0), (account, row)


def test_a_report_has_what_programs_read(tmp_path: Path) -> None:
    found = report(tmp_path, *CUBE, "--steps", "20")
    assert found["mesh"] == {"pp": 2, "dp": 2, "tp": 2}
    assert (found["world_size"], found["backend"], found["tokens_per_step"]) == (8, "gloo", 128)
    assert found["parameters"] == 2 * (12 * 16**2 + 13 * 16) + (2 * 300 + 16 + 2) * 16  # untied, two layers
    for key in ("losses", "grad_norms", "step_seconds"):
        assert len(found[key]) == 20 and all(value > 0 for value in found[key])
    assert found["losses"][-1] < found["losses"][0] - 0.5
    assert found["tokens_per_second"] > 0 and found["startup_seconds"] > 0
    assert set(found["bubble"]) == {"measured", "predicted", "ideal"}
    assert found["bubble"]["ideal"] == pytest.approx(1 / 2)  # (p - 1) / m
    message = found["communication"][0]
    assert {"group", "op", "calls_per_step", "bytes_per_step", "predicted_bytes_per_step"} <= message.keys()
    assert {"rank", "predicted", *ACCOUNTS} <= found["memory"][0].keys()
    check_accounts(found)


def test_losses_do_not_depend_on_the_topology(tmp_path: Path) -> None:
    """In float32, with ZeRO and sequence parallel, over 10 steps."""
    one = report(tmp_path, "--dp", "1", "--steps", "10")
    for options in ([*CUBE, "--zero", "1"], ["--dp", "2", "--tp", "2", "--sequence-parallel", "--zero", "3"]):
        many = report(tmp_path, *options, "--steps", "10")
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-4)
        assert many["grad_norms"] == pytest.approx(one["grad_norms"], rel=1e-4)
        check_accounts(many)


# How it ends when it is stopped.


class Run:
    """A run in a session of its own, so that every process of it can be found, whoever its parent is by then."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.log = folder / "log"
        with open(self.log, "w") as log:
            command = [*MINIPAR, "--steps", "1000000", *options]
            environment = os.environ | {"TMPDIR": str(folder)}
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def others(self) -> list[psutil.Process]:
        """The living processes of the run, without the launcher."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                same = os.getsid(process.pid) == self.process.pid != process.pid
                if same and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """Those that the server has forked."""
        found = []
        for process in self.others():
            with suppress(psutil.Error):
                if process.ppid() != self.process.pid:
                    found.append(process)
        return found

    def wait_until(self, what: Any, seconds: float = 120.0) -> None:
        end = monotonic() + seconds
        while not what():
            assert monotonic() < end and self.process.poll() is None, self.log.read_text()
            sleep(0.02)

    def trains(self) -> bool:
        return "step " in self.log.read_text()

    def starts(self) -> bool:
        """Whether the server is there, and loads torch."""
        with suppress(psutil.Error):
            servers = [process for process in self.others() if "forkserver" in " ".join(process.cmdline())]
            return any(process.memory_info().rss > 40e6 for process in servers)
        return False

    def ends(self, seconds: float) -> int:
        """Its exit code, at most so many seconds from now; 2 seconds later all of its processes have ended."""
        code = self.process.wait(timeout=seconds)
        end = monotonic() + 2.0
        while self.others() and monotonic() < end:
            sleep(0.02)
        assert self.others() == []
        return code

    def said(self) -> str:
        """What it printed last."""
        return self.log.read_text().splitlines()[-1]


def test_a_killed_rank_ends_the_run_in_seconds_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("before")
    run = Run(tmp_path, *CUBE, "--report", str(tmp_path / "r.json"))
    run.wait_until(run.trains)
    assert len(run.ranks()) == 8
    run.ranks()[3].kill()
    assert run.ends(10) == 1
    said = run.log.read_text()
    assert re.search(r"^minipar train: rank [0-7] was killed by signal 9 \(SIGKILL\)", said, re.MULTILINE)
    assert "Traceback" not in said
    assert list(tmp_path.glob("minipar-*")) == []
    assert (tmp_path / "r.json").read_text() == "before"
    assert [path.name for path in tmp_path.glob(".minipar*")] == []


@pytest.mark.parametrize("when", ["trains", "starts"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_stopped_run_leaves_nobody_behind(tmp_path: Path, number: signal.Signals, code: int, when: str) -> None:
    run = Run(tmp_path, "--pp", "2")
    run.wait_until(getattr(run, when))
    run.process.send_signal(number)
    assert run.ends(20) == code
    if when == "trains" or number != signal.SIGKILL:  # else nobody is left who could
        assert list(tmp_path.glob("minipar-*")) == []
    if number != signal.SIGKILL:
        assert run.said() == "minipar train: interrupted, all ranks have ended"
        assert "Traceback" not in run.log.read_text()


def test_ctrl_c_before_any_rank_is_one_line(tmp_path: Path) -> None:
    """While torch is imported, which may swallow an exception."""
    run = Run(tmp_path)
    run.wait_until(lambda: psutil.Process(run.process.pid).memory_info().rss > 60e6)
    run.process.send_signal(signal.SIGINT)
    assert run.ends(20) == 130
    assert re.fullmatch(r"minipar.*: interrupted, .*\n", run.log.read_text())


# Under torchrun.


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def loopback() -> dict[str, str]:
    return os.environ | {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def test_two_nodes_of_torchrun_train_as_forked_ranks_do(tmp_path: Path) -> None:
    same = ["--tp", "2", "--dp", "2", "--steps", "3"]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "test"]
    command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", *meet, "-m", *MINIPAR[2:], *same]
    nodes = []
    for number in range(2):
        file = open(tmp_path / f"{number}", "w")  # noqa: SIM115 -- two run at once
        options = ["--report", str(tmp_path / "nodes.json")]
        nodes.append((subprocess.Popen([*command, *options], stdout=file, stderr=file, env=loopback()), file))
    for node, file in nodes:
        assert node.wait(timeout=180) == 0, Path(file.name).read_text()
        file.close()
    told = "".join((tmp_path / str(number)).read_text() for number in range(2))
    assert told.count("files found") == told.count("Memory by rank") == 1
    over_nodes = json.loads((tmp_path / "nodes.json").read_text())
    forked = report(tmp_path, *same)
    assert over_nodes["losses"] == pytest.approx(forked["losses"], rel=1e-6)
    check_accounts(over_nodes)


def test_torchruns_own_restart_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    """Elastic: torchrun starts all ranks anew, and they find where they were."""
    same = ["--tp", "2", "--steps", "8"]
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", *MINIPAR[2:], *same]
    command += ["--save", str(tmp_path / "kept"), "--save-every", "3", "--report", str(tmp_path / "again.json")]
    done = subprocess.run(
        [*command, "--inject", "kill@5:rank1"], capture_output=True, text=True, env=loopback(), timeout=240
    )
    assert done.returncode == 0, done.stderr
    again, whole = json.loads((tmp_path / "again.json").read_text()), report(tmp_path, *same)
    assert again["losses"] == pytest.approx(whole["losses"][3:], rel=1e-6) and len(again["losses"]) == 5


def test_bad_input_under_torchrun_is_told_once_and_every_rank_ends() -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "3", "-m", *MINIPAR[2:], "--dp", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=loopback(), timeout=180)
    assert done.returncode != 0
    assert re.findall(r"^minipar.*", done.stderr, re.MULTILINE)[:1] == [
        "minipar train: dp 2 x pp 1 x tp 1 = 2 ranks, but there are 3: choose --dp 3, or start 2 ranks"
    ]
    assert done.stderr.count("dp 2 x pp 1") == 1
