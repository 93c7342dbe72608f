"""Ranks start, talk, print, fail and end as `minipar.launch` promises: shown on real ranks."""

from __future__ import annotations

import importlib
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import cloudpickle
import psutil
import pytest
import torch

import minipar
from minipar import server
from minipar.board import Board
from minipar.output import Output, fold, name_ranks

# The functions below go to the ranks by value, so that no rank has to import this file and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(minipar.__file__).parents[1]


def children() -> list[str]:
    """The rank processes that descend from this one: the server and the resource tracker are not ranks."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            parent, command = process.parent(), " ".join(process.cmdline())
        except psutil.Error:
            continue
        is_server = parent is not None and parent.pid == os.getpid()
        if "multiprocessing" in command and not is_server:
            found.append(command)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After every test, failed ranks or not: no rank process, no temporary file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert children() == []
    assert list(tmp_path.glob("minipar-world-*")) == []


def failure(fn: Callable[..., Any], ranks: int, *args: Any, **options: Any) -> minipar.RankError:
    with pytest.raises(minipar.RankError) as caught:
        minipar.run(fn, ranks, *args, **options)
    return caught.value


def line_of(text: str) -> str:
    """'test_launch.py:12' for the line of this file that ends in the comment `text`."""
    lines = Path(__file__).read_text().splitlines()
    return f"test_launch.py:{next(n for n, line in enumerate(lines, 1) if line.endswith(f'# {text}'))}"


# Results.


def total(group: Any, base: float = 0.0) -> torch.Tensor:
    result: torch.Tensor = group.all_reduce(torch.tensor(base + group.rank))
    return result


def test_results_come_back_in_the_order_of_ranks() -> None:
    assert minipar.run(lambda group, factor, shift=0: factor * group.rank + shift, 3, 10, shift=1) == [1, 11, 21]


def test_ranks_reduce_tensors() -> None:
    assert [float(x) for x in minipar.run(total, 4, base=1.0)] == [10.0] * 4


def test_a_world_of_one_rank_works_as_any_other() -> None:
    assert [float(x) for x in minipar.run(total, 1)] == [0.0]


def test_a_mesh_is_joined_on_every_rank() -> None:
    def place(mesh: Any) -> tuple[int, int, int, int]:
        return mesh.pp.rank, mesh.dp.rank, mesh.tp.size, mesh.world.size

    places = minipar.run(place, minipar.Mesh(pp=2, dp=2))
    assert sorted(places) == [(0, 0, 1, 4), (0, 1, 1, 4), (1, 0, 1, 4), (1, 1, 1, 4)]


def test_a_world_keeps_state_between_calls() -> None:
    def remember(group: Any, value: int) -> None:
        group.state.value = value + group.rank

    with minipar.World(2) as world:
        world.run(remember, 5)
        assert world.run(lambda group: group.state.value) == [5, 6]


def test_closing_twice_is_fine_and_a_closed_world_says_so() -> None:
    world = minipar.World(2)
    assert world.run(lambda group: group.size) == [2, 2]
    world.close()
    world.close()
    with pytest.raises(RuntimeError, match="closed"):
        world.run(total)


def test_a_world_that_is_forgotten_ends_its_ranks() -> None:
    world = minipar.World(2)
    world.run(total)
    assert len(children()) == 2
    del world


def test_ranks_take_over_environment_directory_path_and_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(group: Any) -> tuple[Any, ...]:
        dtype = str(torch.ones(1).dtype)
        return os.environ.get("MINIPAR_TEST"), os.environ.get("GONE"), os.getcwd(), sys.path[0], dtype

    monkeypatch.setenv("GONE", "1")
    server.warm()
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("MINIPAR_TEST", "yes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/somewhere")
    torch.set_default_dtype(torch.float64)
    try:
        answers = minipar.run(settings, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert answers == [("yes", None, str(tmp_path), "/somewhere", "torch.float64")] * 2


def test_a_rank_has_one_thread_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert minipar.run(lambda group: torch.get_num_threads(), 1) == [1]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert minipar.run(lambda group: torch.get_num_threads(), 1) == [2]


def test_large_arguments_and_results_travel() -> None:
    numbers = torch.arange(3_000_000)
    assert all(torch.equal(x, numbers + r) for r, x in enumerate(minipar.run(lambda g, x: x + g.rank, 2, numbers)))


def test_processes_are_spawned_where_there_is_no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "FORKS", False)
    assert [float(x) for x in minipar.run(total, 1, base=2.0)] == [2.0]


# What is refused, in one line.


@pytest.mark.parametrize("ranks", [0, -1, 2.5, "4", True, None])
def test_what_is_no_number_of_ranks_is_refused(ranks: Any) -> None:
    with pytest.raises(ValueError, match="choose a whole number") as caught:
        minipar.run(total, ranks)
    assert "\n" not in str(caught.value)


def test_more_ranks_than_memory_are_refused_with_numbers_and_a_way_out() -> None:
    with pytest.raises(ValueError, match=r"^1000000 ranks need about \d+.*choose at most \d+ ranks[^\n]*$"):
        minipar.run(total, 1_000_000)


def test_a_function_that_says_torch_and_config_travels() -> None:
    """cloudpickle takes `torch.distributed.config` along, a module of a class of its own, once it is imported."""
    importlib.import_module("torch.distributed.config")
    assert type(sys.modules["torch.distributed.config"]) is not type(sys)

    def configured(group: Any, config: Any) -> float:
        return float(torch.ones(config.size).sum())  # `torch` and `config`

    assert minipar.run(configured, 2, SimpleNamespace(size=3, config=1)) == [3.0, 3.0]


def test_arguments_that_cannot_travel_are_refused() -> None:
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        minipar.run(total, 2, threading.Lock())


# Output.


def printed(fn: Callable[..., Any], ranks: int, **options: Any) -> dict[str, str]:
    """What `fn` prints on the ranks, by stream."""
    texts = {"stdout": "", "stderr": ""}

    def take(stream: str, text: str) -> None:
        texts[stream] += text

    with minipar.World(ranks, on_output=take, **options) as world:
        world.run(fn)
    return texts


def test_lines_are_whole_and_name_their_rank() -> None:
    def chatter(group: Any) -> None:
        for i in range(200):
            os.write(1, b"line ")
            os.write(1, f"{i}\n".encode())

    lines = printed(chatter, 3)["stdout"].splitlines()
    assert all(re.fullmatch(r"\[rank \d] line \d+", line) for line in lines)
    for rank in range(3):
        assert [line for line in lines if f"rank {rank}" in line] == [f"[rank {rank}] line {i}" for i in range(200)]


def test_streams_stay_apart_and_unfinished_lines_are_shown() -> None:
    def speak(group: Any) -> None:
        print("out", end="")
        print("érr", file=sys.stderr, end="")

    assert printed(speak, 1) == {"stdout": "[rank 0] out\n", "stderr": "[rank 0] érr\n"}


def test_bytes_that_are_no_text_and_output_of_c_are_shown() -> None:
    def speak(group: Any) -> None:
        import ctypes

        ctypes.CDLL(None).puts(b"from C \xff")

    assert printed(speak, 1)["stdout"] == "[rank 0] from C \ufffd\n"


def test_output_goes_to_the_callers_streams(capsys: pytest.CaptureFixture[str]) -> None:
    minipar.run(lambda group: print("hello"), 1)
    assert capsys.readouterr().out == "[rank 0] hello\n"


def test_a_terminal_that_knows_fewer_characters_gets_what_it_can_show(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    minipar.run(lambda group: print("grüß dich"), 1)
    assert written.getvalue() == b"[rank 0] gr?? dich\n"


def test_output_is_live() -> None:
    seen: list[float] = []

    def speak(group: Any) -> float:
        print("now")
        time.sleep(0.5)
        return time.time()

    with minipar.World(1, on_output=lambda stream, text: seen.append(time.time())) as world:
        (end,) = world.run(speak)
    assert seen[0] < end - 0.2


@pytest.mark.parametrize("fold_lines", [False, True])
def test_a_flood_of_output_neither_blocks_nor_piles_up(fold_lines: bool) -> None:
    sizes: list[int] = []

    def flood(group: Any) -> None:
        block = "".join(f"rank {group.rank} line {i} {'x' * 80}\n" for i in range(1000))
        for _ in range(30):
            sys.stdout.write(block)

    before = psutil.Process().memory_info().rss
    with minipar.World(2, fold=fold_lines, on_output=lambda stream, text: sizes.append(text.count("\n"))) as world:
        world.run(flood)
    assert sum(sizes) == 60_000
    assert psutil.Process().memory_info().rss - before < 50e6


def test_alike_lines_fold_and_each_rank_keeps_its_order() -> None:
    def speak(group: Any) -> None:
        print(f"hello\nI am {group.rank}\nbye")

    shown = ""

    def take(stream: str, text: str) -> None:
        nonlocal shown
        shown += text

    with minipar.World(3, fold=True, on_output=take) as world:
        for _ in range(5):  # on a busy machine, twins may come too late
            world.run(lambda group: group.barrier())
            shown = ""
            world.run(speak)
            if shown.count("\n") == 5:
                break
    lines = shown.splitlines()
    assert lines[0] == "[ranks 0-2] hello" and lines[-1] == "[ranks 0-2] bye"
    assert sorted(lines[1:-1]) == ["[rank 0] I am 0", "[rank 1] I am 1", "[rank 2] I am 2"]


def test_a_line_waits_a_tenth_of_a_second_for_its_twins() -> None:
    shown: list[str] = []
    output = Output([0, 1, 2], lambda stream, text: shown.append(text), fold=True)
    output.feed("stdout", 0, b"same\n", 10.0)
    output.feed("stdout", 2, b"own\nsame\n", 10.05)
    output.release(10.09)
    assert shown == []
    output.release(10.11)
    assert shown == ["[rank 2] own\n[ranks 0,2] same\n"]
    output.feed("stdout", 1, b"same\n", 11.0)
    output.finish()
    assert shown[1:] == ["[rank 1] same\n"]


def test_a_progress_bar_is_shown_once() -> None:
    shown: list[str] = []
    output = Output([0], lambda stream, text: shown.append(text), fold=False)
    output.feed("stderr", 0, b"\r10%\r50%\r100%\r\n", 0.0)
    assert shown == ["[rank 0] 100%\n"]


def test_ranks_have_short_names() -> None:
    assert [name_ranks(r) for r in ([3], [0, 1, 2, 3], [0, 2], [0, 1, 2, 5])] == [
        "rank 3", "ranks 0-3", "ranks 0,2", "ranks 0-2,5"
    ]  # fmt: skip
    assert fold({0: "6", 1: "6", 2: "7\n8"}) == "[ranks 0,1] 6\n[rank 2] 7\n[rank 2] 8\n"


# Faults: an exception.


def one_raises(group: Any, error: BaseException) -> None:
    if group.rank == 1:
        raise error  # one raises
    group.all_reduce(torch.ones(3))


def test_an_exception_names_rank_and_line_and_hides_the_frames_of_minipar() -> None:
    error = failure(one_raises, 3, ValueError("bad luck"))
    assert str(error).startswith("rank 1 raised ValueError: bad luck\n")
    file, line = line_of("one raises").split(":")
    assert f'{file}", line {line}, in one_raises' in str(error)
    assert "raise error  # one raises" in str(error)
    assert "rank.py" not in str(error) and "comm.py" not in str(error)
    assert error.rank == 1 and [f.rank for f in error.failures] == [1]


def test_system_exit_is_an_exception_like_others() -> None:
    assert str(failure(one_raises, 2, SystemExit(4))).startswith("rank 1 raised SystemExit: 4")


def test_an_exception_that_cannot_be_pickled_is_told() -> None:
    def trouble(group: Any) -> None:
        class Odd(Exception):
            pass

        raise Odd("odd", threading.Lock())

    assert re.match(r"rank 0 raised .*Odd: \('odd', ", str(failure(trouble, 1)))


def test_a_cause_is_told_with_the_exception() -> None:
    def trouble(group: Any) -> None:
        try:
            {}["x"]
        except KeyError as error:
            raise RuntimeError("outer") from error

    text = str(failure(trouble, 1))
    assert "raised RuntimeError: outer" in text and "KeyError: 'x'" in text and "direct cause" in text


def test_frames_of_torch_are_hidden_and_ranks_that_fail_alike_are_one() -> None:
    def shapes(group: Any) -> None:
        torch.nn.Linear(3, 4)(torch.ones(5))

    text = str(failure(shapes, 2))
    assert text.startswith("ranks 0,1 raised RuntimeError: mat1 and mat2") and "site-packages" not in text


def test_a_wrong_call_is_told_without_any_frames() -> None:
    assert "\n" not in str(failure(lambda group: None, 2, "too many"))


def test_a_value_that_cannot_be_sent_back_is_told() -> None:
    text = str(failure(lambda group: threading.Lock(), 2))
    assert text.startswith("ranks 0,1 returned a lock that cannot be sent back")


# Faults: a death.


def test_a_rank_that_exits_is_named_with_its_code_and_what_its_peers_waited_for() -> None:
    def leave(group: Any) -> None:
        group.barrier()  # all have joined
        if group.rank == 2:
            os._exit(3)
        group.all_reduce(torch.ones(3))

    error = failure(leave, 3)
    assert str(error).startswith("rank 2 exited with code 3 after barrier in world\n")
    assert "rank 0 waited for all_reduce of 12 bytes in world" in str(error)
    assert error.rank == 2 and {f.kind for f in error.failures} <= {"died", "disconnected"}


def test_a_killed_rank_is_named_within_seconds_with_what_it_waited_for() -> None:
    def killed(group: Any) -> None:
        if group.rank == 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
            group.recv(torch.ones(2), 0)
        time.sleep(60)

    start = time.monotonic()
    text = str(failure(killed, 2))
    assert time.monotonic() - start < 5
    assert text.startswith("rank 1 was killed by signal 9 (SIGKILL) while it waited for recv from rank 0 in world")


def test_sizes_that_differ_abort_and_the_call_of_each_rank_is_told() -> None:
    text = str(failure(lambda group: group.all_reduce(torch.ones(1000 if group.rank == 0 else 1)), 2))
    assert "rank 1 was killed by signal 6 (SIGABRT)" in text
    assert re.search("rank 0 (waited for|had done) all_reduce of 4000 bytes in world", text)
    assert "check=True" in text


def test_with_check_on_sizes_that_differ_are_explained() -> None:
    text = str(failure(lambda group: group.all_reduce(torch.ones(1 + group.rank)), 2, check=True))
    assert "rank 0 calls all_reduce of 1 float32" in text and "rank 1 calls all_reduce of 2 float32" in text


def test_ranks_end_when_the_server_that_forks_them_dies() -> None:
    with minipar.World(2) as world:
        ranks = [psutil.Process(pid) for pid in world.run(lambda group: os.getpid())]
        ranks[0].parent().kill()
        with pytest.raises(minipar.RankError, match=r"^ranks 0,1 lost the server that forks ranks"):
            world.run(lambda group: group.recv(torch.ones(2), 1 - group.rank))
    end = time.monotonic() + 5
    while any(is_alive(rank) for rank in ranks) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(is_alive(rank) for rank in ranks)


# Faults: a standstill.


def receive_first(group: Any) -> None:
    x = torch.ones(4)
    if group.rank == 0:
        group.recv(x, 1)  # rank 0 receives
    else:
        group.recv(x, 0)  # rank 1 receives


def test_a_deadlock_is_told_with_the_message_and_the_line_of_each_rank() -> None:
    minipar.run(total, 2)  # the server is warm
    start = time.monotonic()
    error = failure(receive_first, 2, timeout=1.5)
    assert time.monotonic() - start < 10
    assert str(error).startswith("all ranks are stuck:\n")
    for rank in (0, 1):
        where = f"{line_of(f'rank {rank} receives')} in receive_first: group.recv(x, {1 - rank})"
        waits = f"rank {rank} waits for recv from rank {1 - rank} in world, at "
        assert re.search(waits + ".*" + re.escape(where), str(error))
    assert [f.kind for f in error.failures] == ["stuck", "stuck"]


def test_a_deadlock_is_noticed_without_any_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    from minipar import watch

    monkeypatch.setattr(watch, "QUIET", 1.0)
    assert "all ranks are stuck" in str(failure(receive_first, 2, timeout=None))


def test_waiting_for_a_rank_that_has_finished_is_told() -> None:
    def wait_for_0(group: Any) -> None:
        if group.rank == 1:
            group.recv(torch.ones(2), 0)

    text = str(failure(wait_for_0, 2, timeout=1.0))
    assert text.startswith("rank 1 is stuck:\n  rank 0 has finished\n  rank 1 waits for recv from rank 0")


def test_a_rank_that_computes_too_long_is_told_with_its_line() -> None:
    def dawdle(group: Any) -> None:
        if group.rank == 1:
            time.sleep(60)  # dawdles
        group.barrier()

    text = str(failure(dawdle, 2, timeout=1.0))
    assert text.startswith("no end after 1 s (timeout=1):\n  rank 0 waits for barrier in world, at ")
    assert re.search(rf"rank 1 is computing, at .*{line_of('dawdles')} in dawdle: time.sleep\(60\)", text)


def test_ranks_that_wait_in_turn_are_not_stuck() -> None:
    def ping_pong(group: Any) -> int:
        x = torch.ones(1)
        for _ in range(8):
            if group.rank == 0:
                time.sleep(0.2)
                group.send(x, 1)
                group.recv(x, 1)
            else:
                group.recv(x, 0)
                group.send(x, 0)
        return 8

    with minipar.World(2, timeout=1.0) as world:
        assert world.call(ping_pong, timeout=None) == [8, 8]


def test_a_write_to_the_board_costs_microseconds(tmp_path: Path) -> None:
    board = Board.create(tmp_path, 2)
    write = board.writer(1)
    times = []
    for i in range(2000):
        start = time.perf_counter()
        write(f"all_reduce of {i} bytes in world")
        times.append(time.perf_counter() - start)
    print(f"\nboard: {sorted(times)[1000] * 1e6:.2f} us")
    assert sorted(times)[1000] < 20e-6
    assert (board.read(1).text, board.read(1).waiting) == ("all_reduce of 1999 bytes in world", True)
    write("")
    assert (board.read(1).count, board.read(1).waiting, board.read(0).count) == (2001, False, 0)


# Start-up, and whole programs.


def test_eight_ranks_start_warm(capsys: pytest.CaptureFixture[str]) -> None:
    def first_reduce(group: Any) -> float:
        total(group)
        return time.time()

    figures = []
    for _ in range(3):
        start = time.time()
        figures.append(max(minipar.run(first_reduce, 8)) - start)
    with capsys.disabled():
        load = os.getloadavg()[0]
        print(f"\n8 ranks, warm, to the end of the first all_reduce: {min(figures):.3f} s (load {load:.1f})")


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def test_importing_minipar_imports_no_torch() -> None:
    code = "import sys, minipar, minipar.launch; assert 'torch' not in sys.modules; minipar.run"
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)


SCRIPT = """
import dataclasses, signal, sys, time
import minipar, torch

print("started", flush=True)

@dataclasses.dataclass
class Answer:
    rank: int

def answer(group):
    return Answer(group.rank)

def stuck(group):
    print("stuck", flush=True)
    group.recv(torch.ones(1), 1 - group.rank)

answers = minipar.run(answer, 2)
print("answers", answers == [Answer(0), Answer(1)], flush=True)
try:
    minipar.run(stuck, 2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print("again", minipar.run(lambda group: group.size, 2), flush=True)
minipar.run(stuck, 2, timeout=None)
"""


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs: one that has ended may be listed until its parent has noticed."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Script:
    """A script that runs, what it prints, and the processes that descend from it."""

    def __init__(self, path: Path) -> None:
        temporary = path / "tmp"
        temporary.mkdir()
        (path / "script.py").write_text(SCRIPT)
        self.temporary = temporary
        self.process = subprocess.Popen(
            [sys.executable, str(path / "script.py")],
            env=environment() | {"TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def read_until(self, text: str, times: int = 1) -> None:
        assert self.process.stdout is not None
        while times:
            line = self.process.stdout.readline()
            assert line, "".join(self.lines)
            self.lines.append(line)
            times -= text in line

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.mark.parametrize("fatal", [signal.SIGKILL, signal.SIGTERM])
def test_a_script_without_guard_lives_through_ctrl_c_and_leaves_nothing_when_killed(
    tmp_path: Path, fatal: signal.Signals
) -> None:
    script = Script(tmp_path)
    with script.process:
        script.read_until("answers")
        assert script.lines[-1] == "answers True\n" and script.lines.count("started\n") == 1
        script.read_until("stuck", times=2)
        os.killpg(script.process.pid, signal.SIGINT)  # as a terminal does: to the ranks and the server as well
        pressed = time.monotonic()
        script.read_until("again")
        assert time.monotonic() - pressed < 3
        assert script.lines[-2:] == ["interrupted\n", "again [2, 2]\n"]
        script.read_until("stuck", times=2)
        family = script.family()
        assert len(family) == 4  # server, resource tracker, two ranks
        script.process.send_signal(fatal)
        end = time.monotonic() + 5
        while any(is_alive(process) for process in family) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(is_alive(process) for process in family)
        assert list(script.temporary.glob("minipar-world-*")) == []


def test_torchrun_gives_its_own_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        dedent("""
        import minipar, torch
        def total(group, base):
            return float(group.all_reduce(torch.tensor(base + group.rank)))
        say = lambda *words: print(" ".join(map(str, words)) + "\\n", end="")
        say("results", minipar.run(total, 2, 1.0), minipar.run(lambda mesh: mesh.dp.rank, minipar.Mesh(dp=2)))
        with minipar.World(2) as world:
            world.run(lambda group: setattr(group.state, "x", group.rank))
            say("state", world.run(lambda group: group.state.x))
        try:
            minipar.run(total, 3, 1.0)
        except ValueError as error:
            say("refused:", error)
        """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("results [3.0, 3.0] [0, 1]\n") == 2
    assert done.stdout.count("state [0, 1]\n") == 2
    assert done.stdout.count("refused: 3 ranks are asked for, and torchrun has started 2") == 2


def one_stops(group: Any) -> None:
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.barrier()


def test_a_rank_that_was_stopped_is_named() -> None:
    with pytest.raises(minipar.RankError, match=r"rank 1 does not go on(.|\n)*rank 1 has been stopped, by a signal"):
        minipar.run(one_stops, 2, timeout=1)
