"""The grader: what crosses its sockets, what its switch sees, what answers may not do, and how marks are made."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import minipar
from minipar import cli
from minipar.grade import classroom, exercise, frames, trial, walls
from minipar.grade.judging import Draw, Judge, same
from minipar.grade.trial import Case, Outcome

Run = Callable[..., tuple[int, str, str]]
HARNESS = "def harness(student, group, x):\n    return student.answer(x, group)\n"
SOLUTION = (walls.SOLUTIONS / "01_ring_all_reduce.py").read_text()


@pytest.fixture(scope="module")
def nursery() -> Iterator[trial.Nursery]:
    with trial.Nursery() as found:
        yield found


def tried(nursery: trial.Nursery, source: str, ranks: int = 3, seconds: float = 5.0) -> Outcome:
    case = Case([{"x": torch.arange(6.0) + 10 * rank} for rank in range(ranks)])
    return trial.run(nursery, source, HARNESS, case, seconds)


# Frames.


VALUES = [1, -2.5, True, None, "text", [1, [2]], {"a": torch.arange(3), "b": [torch.ones(2, 0), torch.tensor(2.0)]},
          torch.randn(2, 3).to(torch.bfloat16), torch.tensor([True, False])]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_frame_brings_back_what_was_sent(value: Any) -> None:
    (back,) = frames.Reader().feed(frames.pack(value))
    assert same(back, value) if isinstance(value, torch.Tensor | dict) else back == value
    reader, data = frames.Reader(), frames.pack(value)
    assert [one for byte in data for one in reader.feed(bytes([byte]))] != []


class Strange(torch.Tensor):
    pass


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, torch.ones(1).as_subclass(Strange), 1j], ids=repr)
def test_anything_else_is_no_frame(value: Any) -> None:
    with pytest.raises(frames.FrameError):
        frames.pack(value)


@pytest.mark.parametrize(
    "data",
    [
        frames.SIZES.pack(1 << 30, 0),
        frames.SIZES.pack(0, 1 << 30),
        frames.SIZES.pack(3, 0) + b"{]}",
        frames.SIZES.pack(40, 0) + b'{"tensor": [9999], "dtype": "float32"}  ',
        frames.SIZES.pack(38, 0) + b'{"tensor": [-1], "dtype": "float32"}  ',
        frames.SIZES.pack(38, 0) + b'{"tensor": [1], "dtype": "object"}    ',
        frames.SIZES.pack(1, 4) + b"1abcd",
    ],
)
def test_a_forged_frame_is_refused(data: bytes) -> None:
    with pytest.raises(frames.FrameError):
        frames.Reader().feed(data)


# The switch: its collectives are those of the engine.

EVERY = """
import torch
def answer(x, group):
    n, r = group.size, group.rank
    right, left = (r + 1) % n, (r - 1) % n
    into = torch.empty_like(x)
    arriving = group.recv(into, left, async_op=True)
    group.send(x * 2, right)
    arriving.wait()
    later = group.all_reduce(x.clone(), async_op=True)
    found = {
        "mean": group.all_reduce(x.clone(), "mean"), "max": group.all_reduce(x.clone(), "max"),
        "gather": group.all_gather(x), "scatter": group.reduce_scatter(x.clone()), "all": group.all_to_all(x),
        "from": group.broadcast(x.clone(), 1), "ring": into, "later": later.wait(),
    }
    group.barrier()
    return found
"""


def test_the_switch_does_what_the_engine_does(nursery: trial.Nursery) -> None:
    outcome = tried(nursery, EVERY)
    names: dict[str, Any] = {}
    exec(EVERY, names)

    def on_rank(group: Any, answer: Callable[..., Any]) -> Any:
        return answer(torch.arange(6.0) + 10 * group.rank, group)

    real = minipar.run(on_rank, 3, names["answer"])
    assert outcome.failure == "" and same(outcome.values, real)
    assert [(c.op, c.waits) for c in outcome.calls if c.rank == 0][:3] == [
        ("recv", False),
        ("send", True),
        ("all_reduce", False),
    ]


STUCK = [
    (
        "def answer(x, g):\n    g.send(x, (g.rank + 1) % g.size)\n",
        ["rank 0 waits in send", "for rank 1 to receive", "line 2"],
    ),
    (
        "def answer(x, g):\n    if g.rank:\n        g.all_reduce(x)\n",
        ["rank 1 waits in all_reduce", "for rank 0", "line 3"],
    ),
    ("def answer(x, g):\n    g.recv(x, (g.rank + 1) % g.size)\n    g.send(x, 0)\n", ["for rank 1 to send", "line 2"]),
]


@pytest.mark.parametrize(("source", "words"), STUCK)
def test_a_deadlock_is_known_at_once_and_says_who_waits_for_whom(
    nursery: trial.Nursery, source: str, words: list[str]
) -> None:
    start = time.monotonic()
    outcome = tried(nursery, source, seconds=60)
    assert outcome.kind == "stuck" and all(word in outcome.failure for word in words), outcome.failure
    assert time.monotonic() - start < 20


def test_calls_that_differ_are_told(nursery: trial.Nursery) -> None:
    source = "def answer(x, g):\n    return g.all_gather(x) if g.rank else g.all_reduce(x)\n"
    outcome = tried(nursery, source)
    assert outcome.kind == "mismatch" and "rank 0 calls all_reduce" in outcome.failure


# What answers may not do, and what becomes of them.

ATTACKS = {
    "sys.exit": ("import sys\ndef answer(x, g):\n    sys.exit(0)", "raised", "SystemExit"),
    "os._exit": ("import os\ndef answer(x, g):\n    os._exit(0)", "ended", "exit code 0"),
    "BaseException": ("def answer(x, g):\n    raise KeyboardInterrupt", "raised", "KeyboardInterrupt"),
    "an endless loop": ("def answer(x, g):\n    while True:\n        pass", "time", "rank 0 is at line"),
    "a memory bomb": ("import torch\ndef answer(x, g):\n    return torch.ones(10**10)", "raised", "memory"),
    "a fork bomb": (
        "import os\ndef answer(x, g):\n    while True:\n        os.fork()",
        "raised",
        "may not do this: os.fork",
    ),
    "another program": (
        "import os\ndef answer(x, g):\n    os.system('sleep 100')",
        "raised",
        "may not do this: os.system",
    ),
    "a flood of output": ("def answer(x, g):\n    while True:\n        print('x' * 5000)", "time", ""),
    "reading the reference": (
        f"def answer(x, g):\n    return open({exercise.__file__!r}).read()",
        "raised",
        "may not read",
    ),
    "importing the reference": ("import minipar.tp\ndef answer(x, g):\n    return x", "raised", "may not import"),
    "importing the solutions": (
        "from minipar.grade import solutions\ndef answer(x, g): pass",
        "raised",
        "may not import",
    ),
    "listing our files": (
        f"import os\ndef answer(x, g):\n    os.listdir({str(walls.CHECKS)!r})",
        "raised",
        "may not read",
    ),
    "the grader's memory": ("def answer(x, g):\n    open('/proc/self/mem', 'rb')", "raised", "may not read"),
    "writing elsewhere": ("def answer(x, g):\n    open('../forged', 'w')", "raised", "its own folder only"),
    "the network": (
        "import torch\ndef answer(x, g):\n    import socket\n    socket.socket()",
        "raised",
        "may not import socket",
    ),
    "ctypes": ("import ctypes\ndef answer(x, g): pass", "raised", "may not import ctypes"),
    "another process": (
        "import os\ndef answer(x, g):\n    os.kill(os.getppid(), 9)",
        "raised",
        "may not do this: os.kill",
    ),
    "equal to everything": (
        "class E:\n    def __eq__(self, other):\n        return True\ndef answer(x, g):\n    return E()",
        "raised",
        "a E cannot be handed",
    ),
    "a subclass of Tensor": (
        "import torch\nclass E(torch.Tensor):\n    pass\ndef answer(x, g):\n    return x.as_subclass(E)",
        "raised",
        "cannot be handed",
    ),
    "an error that cannot be shown": (
        "class E(Exception):\n    def __str__(self):\n        raise ValueError\ndef answer(x, g):\n    raise E",
        "raised",
        "E",
    ),
    "a syntax error": ("def answer(x, g:\n", "raised", "line 1"),
    "no function": ("x = 1\n", "raised", "answer"),
    "not written": ("def answer(x, g):\n    raise NotImplementedError", "unwritten", "NotImplementedError"),
    "frames of its own": ("def answer(x, g):\n    g._line._connection.sendall(b'x' * 100)", "ended", "no message"),
    "a forged call": (
        "def answer(x, g):\n    g._line.ask(dict(op='no', group='world', how='', peer=-1, tag='', waits=1, tensor=x))",
        "ended",
        "which there is not",
    ),
    "too many messages": (
        "def answer(x, g):\n    while True:\n        g.recv(x, (g.rank + 1) % g.size, async_op=True)",
        "calls",
        "cannot be meant",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_contained_and_given_its_plain_reason(nursery: trial.Nursery, attack: str) -> None:
    source, kind, words = ATTACKS[attack]
    outcome = tried(nursery, source, seconds=3.0)
    assert (outcome.kind, words in outcome.failure) == (kind, True), (outcome.kind, outcome.failure)
    assert len(outcome.printed) <= 2 * trial.MOST_PRINTED and not os.path.exists(Path(nursery.folder) / "forged")
    assert not [p for p in psutil.Process(nursery._process.pid).children() if p.status() != psutil.STATUS_ZOMBIE]
    assert tried(nursery, "def answer(x, g):\n    return g.all_reduce(x)\n").failure == ""  # the next is untouched


MORE = {
    "a file elsewhere": ("def answer(x, g):\n    return len(open('/etc/passwd').read())", "may not read"),
    "a file by its folder": (
        "import os\ndef answer(x, g):\n    d = os.open('/', os.O_RDONLY)\n    os.open('etc/passwd', 0, dir_fd=d)",
        "may not",
    ),
    "a link to a file": ("import os\ndef answer(x, g):\n    os.link('/etc/passwd', 'x')", "its own folder only"),
    "moving a file out": (
        "import os\ndef answer(x, g):\n    open('a', 'w')\n    os.rename('a', '../forged')",
        "its own folder only",
    ),
    "a changed isinstance": (
        "import builtins\ndef answer(x, g):\n    builtins.isinstance = lambda a, b: False\n    open('/etc/passwd')",
        "may not",
    ),
    "a changed bool": (
        "import builtins, os\ndef answer(x, g):\n    builtins.bool = lambda a: 0\n    open(os.__file__ + '.x', 'w')",
        "its own folder only",
    ),
    "another rank's folder": ("import os\ndef answer(x, g):\n    return os.listdir('..')", "may not read"),
    "a program by the back door": ("import _posixsubprocess\ndef answer(x, g):\n    pass", "may not import"),
    "an error with half a character": ("def answer(x, g):\n    raise ValueError('\\ud800 \\x1b[2J')", "ValueError"),
    "the mean of whole numbers": (
        "def answer(x, g):\n    return g.all_reduce(x.long(), 'mean')",
        "with tensor.double()",
    ),
    "a hundred dimensions": ("def answer(x, g):\n    return g.all_reduce(x[:1].view([1] * 64))", ""),
}


@pytest.mark.parametrize("attack", MORE)
def test_more_of_the_kind_is_told_in_printable_words(nursery: trial.Nursery, attack: str) -> None:
    source, words = MORE[attack]
    outcome = tried(nursery, source)
    assert outcome.failure and words in outcome.failure and not os.path.exists(Path(nursery.folder) / "forged")
    outcome.failure.encode()
    assert "\x1b" not in outcome.failure


def test_many_messages_on_their_way_do_not_block_the_grader(nursery: trial.Nursery) -> None:
    source = """
import torch
def answer(x, group):
    waiting = [group.all_reduce(torch.ones(60_000), async_op=True) for _ in range(8)]
    return sum(float(one.wait().sum()) for one in waiting)
"""
    outcome = tried(nursery, source, seconds=20)
    assert outcome.failure == "" and outcome.values == [8 * 60_000 * 3.0] * 3


JUNK = ["None", "5", "'x'", "[]", "{}", "torch.zeros(3)"]


@pytest.mark.parametrize("value", JUNK)
@pytest.mark.parametrize("name", ["03", "21", "26"])
def test_junk_earns_nothing(nursery: trial.Nursery, name: str, value: str) -> None:
    one = exercise.find(name)
    functions = re.findall(r"^def (\w+)", one.file.read_text(), re.MULTILINE)
    source = "import torch\n" + "".join(f"def {f}(*a, **k):\n    return {value}\n" for f in functions)
    assert exercise.grade(one, source, 0, nursery).score <= 20


def test_processes_and_files_that_an_answer_leaves_are_gone(tmp_path: Path) -> None:
    with trial.Nursery() as own:
        assert tried(own, "def answer(x, g):\n    open('mine', 'w').write('x')\n    return x").failure == ""
        folder, process = own.folder, own._process
    assert not os.path.exists(folder) and process.poll() is not None


BACKWARDS = """
import torch
from torch.utils.checkpoint import checkpoint
def answer(x, g):
    y = x.clone().requires_grad_()
    (y * 2).backward(torch.ones(6))
    (z,) = torch.autograd.grad(checkpoint(torch.sin, y, use_reentrant=False), y, torch.ones(6))
    adam = torch.optim.AdamW([y], lr=0.1)
    adam.step()
    return [y.grad, z]
"""


def test_what_torch_imports_late_is_there_for_answers(nursery: trial.Nursery) -> None:
    outcome = tried(nursery, BACKWARDS)
    assert outcome.failure == "" and same(outcome.values[0][0], torch.full((6,), 2.0))


def test_patching_torch_changes_nothing_but_the_answers_own_values(nursery: trial.Nursery) -> None:
    source = """
import torch
torch.equal = torch.allclose = lambda *a, **k: True
torch.Tensor.__eq__ = lambda self, other: True
def answer(x, group):
    group.size
    return x
"""
    one = exercise.find("1")
    result = exercise.grade(one, source.replace("answer", "ring_all_reduce"), 1, nursery)
    assert result.score == 0 and result.checks[0]["message"].startswith("each rank returns what it began with")


def test_without_the_process_that_starts_ranks_there_is_a_reason_and_no_traceback() -> None:
    with trial.Nursery() as own:
        own._process.kill()
        assert "destroyed the process that ran it" in tried(own, "def answer(x, g):\n    return x").failure


# Behind walls.


def no_walls() -> str:
    """Why there can be none here, or ""."""
    try:
        walls.check()
    except ValueError as error:
        return str(error)
    return ""


needs_walls = pytest.mark.skipif(bool(no_walls()), reason=no_walls())

THROUGH_C = f"""
import torch
def answer(x, g):
    size = {(walls.SOLUTIONS / "01_ring_all_reduce.py").stat().st_size}
    return torch.from_file({str(walls.SOLUTIONS / "01_ring_all_reduce.py")!r}, size=size, dtype=torch.uint8).long()
"""


@needs_walls
def test_walls_hold_what_a_hook_cannot(nursery: trial.Nursery) -> None:
    """A library in C opens a file without asking the interpreter: the default mode lets it, as the README says."""
    assert tried(nursery, THROUGH_C).failure == ""
    with trial.Nursery(walls.HIDDEN) as walled:
        outcome = tried(walled, THROUGH_C)
        assert outcome.kind == "raised" and "No such file" in outcome.failure
        assert exercise.grade(exercise.find("1"), SOLUTION, 0, walled).passed
        for attack in ("an endless loop", "os._exit", "writing elsewhere"):
            source, kind, _ = ATTACKS[attack]
            assert tried(walled, source, seconds=2.0).kind == kind


@needs_walls
def test_a_class_is_graded_behind_walls(run: Run, tmp_path: Path, one_exercise: None) -> None:
    hand_in(tmp_path / "in", "anna", SOLUTION)
    assert run("grade", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--isolate")[0] == 0
    assert "anna,100.0,100" in (tmp_path / "out/marks.csv").read_text()


# Marks.


def test_a_mark_counts_points_and_the_first_fault_is_told() -> None:
    judge = Judge.of({"a": 3, "b": 1, "c": 1})
    judge.that("a", True, "")
    judge.that("b", False, "first")
    judge.that("b", False, "second")
    one = exercise.find("1")
    made = exercise.result(one, judge)
    assert made.score == 60 and [c["message"] for c in made.checks] == ["", "first", "not reached"]


def test_a_mistake_is_recognised_by_what_it_gives() -> None:
    judge = Judge.of({"value": 1})
    right = [torch.tensor([2.0, 4.0])]
    judge.equal("value", [torch.tensor([8.0, 16.0])], right, {"not divided": [torch.tensor([6.0, 12.0])]})
    assert judge.checks["value"].message == "the result is wrong: it is exactly 4 times what it should be"
    judge = Judge.of({"value": 1})
    judge.equal("value", [torch.tensor([6.0, 12.0])], right, {"not divided": [torch.tensor([6.0, 12.0])]})
    assert judge.checks["value"].message == "not divided"


@pytest.mark.parametrize(
    "value",
    [float("nan"), torch.tensor([float("nan"), 1.0]), torch.ones(3), torch.ones(2).double(), None, "x", 10**400],
)
def test_nothing_but_the_value_is_the_value(value: Any) -> None:
    assert not same(value, torch.ones(2)) and not same(value, 1.0)


def test_the_same_seed_draws_the_same_cases() -> None:
    one = exercise.find("1")
    first, again, other = (one.cases(Draw(seed)) for seed in (5, 5, 6))
    assert all(same(dict(a.inputs[0]), dict(b.inputs[0])) for a, b in zip(first, again, strict=True))
    assert not all(same(dict(a.inputs[0]), dict(b.inputs[0])) for a, b in zip(first, other, strict=True))


# Every exercise.

EXERCISES = exercise.every()
MUTANTS = sorted(Path(__file__).parent.glob("mutants/*/*.py"))
SEEDS = range(int(os.environ.get("MINIPAR_SEEDS", "2")))

each = pytest.mark.parametrize("one", EXERCISES, ids=lambda one: one.name)


@each
def test_our_solution_has_full_marks(one: exercise.Exercise, nursery: trial.Nursery) -> None:
    source = exercise.read(walls.SOLUTIONS / f"{one.name}.py")
    for seed in SEEDS:
        result = exercise.grade(one, source, seed, nursery)
        assert result.passed, (seed, [check for check in result.checks if not check["passed"]])


@each
def test_an_exercise_is_told_and_unwritten(one: exercise.Exercise, nursery: trial.Nursery) -> None:
    text = one.file.read_text()
    assert text.startswith(
        f'"""Exercise {int(one.name[:2])}. {one.title} ({one.minutes} minutes; lesson {one.lesson})\n'
    )
    assert "raise NotImplementedError" in text and 3 <= len(one.hints) <= 6 and 5 <= one.minutes <= 60
    result = exercise.grade(one, text, 0, nursery)
    assert result.score == 0 and "NotImplementedError" in result.checks[0]["message"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_wrong_answer_fails_with_the_right_diagnosis(mutant: Path, nursery: trial.Nursery) -> None:
    source = mutant.read_text()
    expects = re.match(r"# expects: (.+)", source)
    assert expects, "the first line says what is expected"
    result = exercise.grade(exercise.find(mutant.parent.name), source, 1, nursery)
    messages = [check["message"] for check in result.checks if not check["passed"]]
    assert result.score < 100 and any(expects[1].strip() in message for message in messages), messages


def test_each_exercise_has_four_wrong_answers_or_more() -> None:
    counts = {one.name: sum(path.parent.name == one.name for path in MUTANTS) for one in EXERCISES}
    assert {name: count for name, count in counts.items() if count < 4} == {}


# The commands.


@pytest.fixture(autouse=True)
def own_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINIPAR_PROGRESS", str(tmp_path / "kept" / "progress.json"))
    return tmp_path / "kept" / "progress.json"


def test_an_answer_is_graded_from_its_file_and_progress_is_kept(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOLUTION)
    code, out, _ = run("grade", "1", str(tmp_path / "a.py"), "--json", "--seed", "3")
    found = json.loads(out)
    assert code == 0 and found["exercise"] == "01_ring_all_reduce" and found["score"] == 100 and found["seed"] == 3
    assert {"name", "passed", "message"} <= found["checks"][0].keys()
    rows = json.loads(run("exercises", "--json")[1])
    assert rows[0]["score"] == 100 and rows[0]["passed"] and not rows[1]["passed"]
    code, out, _ = run("grade", "ring_all_reduce")
    assert code == 1 and "0 of 100" in out and "--hint helps" in out and max(map(len, out.splitlines())) <= 80
    assert json.loads(run("exercises", "--json")[1])[0]["score"] == 100  # the best one stays


def test_hints_come_one_at_a_time_and_the_solution_after_passing(run: Run, tmp_path: Path) -> None:
    assert run("exercises", "1", "--hint")[1].count("\n1.") + 1 == 1
    assert "2. " in run("exercises", "1", "--hint")[1]
    code, _, err = run("exercises", "1", "--solution")
    assert code == 2 and "once yours has passed" in err
    (tmp_path / "a.py").write_text(SOLUTION)
    run("grade", "1", str(tmp_path / "a.py"))
    code, out, _ = run("exercises", "1", "--solution")
    assert code == 0 and "--- yours" in out and "+    n, r = group.size, group.rank" in out


@pytest.mark.parametrize("text", ["{", "[1]", '{"01": {"score": 1000, "tries": 1, "hints": 0}}', "\udcff"])
def test_damaged_progress_is_set_aside_and_named(run: Run, own_progress: Path, text: str) -> None:
    own_progress.parent.mkdir()
    own_progress.write_bytes(text.encode("utf-8", "surrogateescape"))
    code, _, err = run("exercises")
    assert code == 0 and "was damaged and is now progress.damaged.json" in err
    assert not own_progress.exists() and own_progress.with_suffix(".damaged.json").exists()


def test_exercises_are_released_alone(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("exercises", "--release", str(tmp_path / "given"))
    assert code == 0 and f"{len(EXERCISES)} exercises" in out
    assert sorted(path.name for path in (tmp_path / "given").iterdir()) == [f"{one.name}.py" for one in EXERCISES]
    assert run("exercises", "--release", str(tmp_path / "given"))[0] == 2


BAD = [
    (("grade", "99"), "there is no exercise '99'"),
    (("grade", "../1"), "there is no exercise"),
    (("grade", ""), "there is no exercise"),
    (("grade", "1", "missing.py"), "is no file"),
    (("grade", "1", "empty.py"), "is empty"),
    (("grade", "1", "latin.py"), "is not UTF-8"),
    (("grade", "1", "zero.py"), "zero bytes"),
    (("grade", "1", "large.py"), "at most 200,000"),
    (("grade", "1", "broken.ipynb"), "neither Python nor a notebook"),
    (("grade", "."), "add --out"),
    (("grade", "1", "--out", "x"), "--out is for a folder"),
    (("exercises", "--hint"), "of which exercise"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD)
def test_what_cannot_be_graded_is_said_in_a_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "zero.py").write_bytes(b"x = 1\0")
    (tmp_path / "large.py").write_text("x = 1\n" * 50_000)
    (tmp_path / "broken.ipynb").write_text('{"cells": 3}')
    code, _, err = run(*arguments)
    assert code == 2 and said in err and len(err.strip().splitlines()) == 1


def test_a_notebook_is_taken_for_its_code(nursery: trial.Nursery, tmp_path: Path) -> None:
    sources = ["%load_ext minipar\n", f"%%grade 1\n{SOLUTION}"]
    cells = [{"cell_type": "code", "source": [source]} for source in sources]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    assert exercise.grade(exercise.find("1"), exercise.read(tmp_path / "a.ipynb"), 0, nursery).passed


# A class.


@pytest.fixture
def one_exercise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that has only the first exercise to do."""
    monkeypatch.setattr(exercise, "every", lambda: [exercise.find("1")])


def hand_in(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "01_ring_all_reduce.py").write_text(text)


@pytest.mark.slow
def test_a_class_of_thirty_is_graded_each_alone_and_the_same_again(
    run: Run, tmp_path: Path, one_exercise: None
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    texts = [SOLUTION, exercise.find("1").file.read_text(), *(source for source, _, _ in ATTACKS.values())]
    for number in range(29):
        text = texts[number % len(texts)].replace("def answer(x, g)", "def ring_all_reduce(x, g)")
        hand_in(folder, f"student {number:02d}", text)
    (folder / '=HYPERLINK("x")').mkdir()
    code, _, _ = run("grade", str(folder), "--out", str(out))
    assert code == 0
    rows = list(csv.reader(io.StringIO((out / "marks.csv").read_text())))
    assert len(rows) == 31 and rows[1][0] == '\'=HYPERLINK("x")' and rows[1][3] == "01_ring_all_reduce"
    marks = {row[0]: row[2] for row in rows[1:]}
    assert marks["student 00"] == "100" and marks["student 28"] == "100"
    assert all(mark == "0" for name, mark in marks.items() if name not in ("student 00", "student 28"))
    failed = list(csv.reader(io.StringIO((out / "checks.csv").read_text())))[1]
    assert failed[2:] == ["27", "29"]
    before = (out / "marks.csv").read_bytes()
    shutil.rmtree(out)
    run("grade", str(folder), "--out", str(out))
    assert (out / "marks.csv").read_bytes() == before


def test_an_interrupted_class_goes_on_where_it_was(run: Run, tmp_path: Path, one_exercise: None) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    hand_in(folder, "anna", SOLUTION)
    hand_in(folder, "ben", "x = (\n")
    run("grade", str(folder), "--out", str(out))
    kept = (out / "anna" / "done.json").stat().st_mtime_ns
    (out / "ben" / "done.json").unlink()
    (folder / "ben" / "01_ring_all_reduce.py").write_text(SOLUTION)
    run("grade", str(folder), "--out", str(out))
    assert (out / "anna" / "done.json").stat().st_mtime_ns == kept
    assert (out / "marks.csv").read_text().count(",100,") == 2


def test_results_have_the_forms_that_others_read(run: Run, tmp_path: Path, one_exercise: None) -> None:
    hand_in(tmp_path / "in", "anna", "def ring_all_reduce(x, g):\n    return g.all_reduce(x)\n")
    run("grade", str(tmp_path / "in"), "--out", str(tmp_path / "out"))
    made = json.loads((tmp_path / "out/anna/results.json").read_text())
    assert sum(t["score"] for t in made["tests"]) == pytest.approx(37.5)
    assert sum(t["max_score"] for t in made["tests"]) == pytest.approx(100)
    for test in made["tests"]:
        assert (
            test["status"] in ("passed", "failed")
            and 0 <= test["score"] <= test["max_score"]
            and test["output_format"] == "text"
        )
    github = json.loads((tmp_path / "out/anna/classroom.json").read_text())
    assert github["version"] == 1 and github["status"] == "fail" and github["max_score"] == 100
    assert {"name", "status", "score", "message", "test_code"} <= github["tests"][0].keys()
    assert "failed: the ring: only neighbours talk" in (tmp_path / "out/anna/feedback.md").read_text()


def test_links_and_names_lead_nowhere_else(run: Run, tmp_path: Path, one_exercise: None) -> None:
    folder = tmp_path / "in"
    (folder / "eve").mkdir(parents=True)
    (folder / "eve" / "01_ring_all_reduce.py").symlink_to(walls.SOLUTIONS / "01_ring_all_reduce.py")
    hand_in(folder, "..x", SOLUTION)
    run("grade", str(folder), "--out", str(tmp_path / "out"))
    assert "a link, which is not followed" in (tmp_path / "out/eve/feedback.md").read_text()
    assert classroom.safe_name("..x").startswith("x-") and classroom.safe_name("anna") == "anna"
    assert run("grade", str(folder), "--out", str(folder / "out"))[0] == 2
    assert cli is not None


# In a notebook.


def test_a_cell_is_graded_and_its_result_is_a_panel() -> None:
    from minipar.grade import panel

    found = panel.grade_cell("1", SOLUTION)
    assert found.result.passed and "100 of 100" in found._repr_html_() and "100 of 100" in repr(found)
    missed = panel.grade_cell("ring_all_reduce", "def ring_all_reduce(x, g):\n    print('<b>')\n    return x\n")
    html = missed._repr_html_()
    assert "0 of 100" in html and "each rank returns what it began with" in html and "&lt;b&gt;" in html
    with pytest.raises(Exception, match="there is no exercise '77'"):
        panel.grade_cell("77", "")
