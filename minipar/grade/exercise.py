"""An exercise: the file that a student edits, and the file that checks it.

Idea    `exercises/01_ring_all_reduce.py` has the story, the signature and a gap; `checks/01_ring_all_reduce.py` has
        what the grader knows: hints, cases, a harness that runs in the answer's ranks, a judge that runs here. A check
        file is plain Python with a few names:

            TITLE, MINUTES, LESSON    what a list shows
            CHECKS                    points by name of a check, in the order in which they are told
            HINTS                     from a nudge to nearly the answer
            harness(student, group, **inputs)      calls the answer on a rank, and returns what is to be judged
            cases(draw) -> [Case]                  sizes, groups and inputs, drawn anew for each seed
            judge(case, outcome, judge)            compares with the truth

Read    `judging.py` before.
"""

from __future__ import annotations

import inspect
import json
import runpy
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minipar.grade import trial
from minipar.grade.judging import Case, Draw, Judge, Outcome
from minipar.grade.walls import CHECKS

EXERCISES = Path(__file__).resolve().parents[2] / "exercises"
LARGEST = 200_000  # bytes of an answer


@dataclass(frozen=True)
class Exercise:
    """What the grader knows of an exercise; `name` is "01_ring_all_reduce"."""

    name: str
    title: str
    minutes: int
    lesson: int
    checks: dict[str, int]
    hints: Sequence[str]
    harness: str
    cases: Callable[[Draw], list[Case]]
    judge: Callable[[Case, Outcome, Judge], None]

    @property
    def file(self) -> Path:
        """The file that a student edits."""
        return EXERCISES / f"{self.name}.py"


@dataclass(frozen=True)
class Result:
    """The mark of an answer, from 0 to 100, and what each check found; `reason` if it could not be tried at all."""

    exercise: str
    score: int
    checks: list[dict[str, Any]]
    reason: str = ""
    printed: str = ""

    @property
    def passed(self) -> bool:
        return self.score == 100


def every(folder: Path = CHECKS) -> list[Exercise]:
    """All exercises, in their order."""
    return [load(path) for path in sorted(folder.glob("[0-9]*.py"))]


def find(name: str, folder: Path = CHECKS) -> Exercise:
    """An exercise by its number ("1", "01") or name. Raises `ValueError`, one line, for another."""
    paths = sorted(folder.glob("[0-9]*.py"))
    wanted = f"{int(name):02d}_" if name.isascii() and name.isdigit() else name
    found = [path for path in paths if path.stem == wanted or path.stem.startswith(wanted) or path.stem[3:] == wanted]
    if len(found) != 1 or not name:
        known = ", ".join(path.stem for path in paths)
        raise ValueError(f"there is no exercise {name!r}: choose from {known}")
    return load(found[0])


def load(path: Path) -> Exercise:
    """Raises `ValueError`, one line, for a check file that lacks something."""
    try:
        names = runpy.run_path(str(path), run_name=f"minipar.grade.checks.{path.stem}")
        return Exercise(
            path.stem,
            names["TITLE"],
            names["MINUTES"],
            names["LESSON"],
            names["CHECKS"],
            names["HINTS"],
            textwrap.dedent(inspect.getsource(names["harness"])),
            names["cases"],
            names["judge"],
        )
    except KeyError as error:
        raise ValueError(f"{path} has no {error.args[0]}: see minipar/grade/exercise.py for what is needed") from None


def read(path: Path) -> str:
    """The text of an answer. Raises `ValueError`, one line, for what is none."""
    try:
        if not path.is_file():
            raise ValueError(f"{path} is no file: name the file with your answer")
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}): name the file with your answer") from None
    if len(data) > LARGEST:
        raise ValueError(f"{path} has {len(data):,} bytes: an answer has at most {LARGEST:,}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}): save it with that encoding") from None
    if "\0" in text:
        raise ValueError(f"{path} has zero bytes: save it as plain text")
    if not text.strip():
        raise ValueError(f"{path} is empty: write your answer into it")
    if text.lstrip().startswith("{") and '"cells"' in text:
        return _of_notebook(path, text)
    return text


def _of_notebook(path: Path, text: str) -> str:
    """The code of a notebook that was handed in instead of a file."""
    try:
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is neither Python nor a notebook that can be read: hand in a .py file") from None
    lines = [line for source in sources for line in [*source.splitlines(), ""]]
    return "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))


def grade(exercise: Exercise, source: str, seed: int, nursery: trial.Nursery, seconds: float = trial.SECONDS) -> Result:
    """Try an answer on all cases of a seed, and judge it."""
    judge, printed = Judge.of(exercise.checks), ""
    for case in exercise.cases(Draw(seed)):
        outcome = trial.run(nursery, source, exercise.harness, case, seconds)
        printed = printed or outcome.printed
        if outcome.failure:
            judge.failed(outcome)
            break
        try:
            exercise.judge(case, outcome, judge)
        except Exception as error:  # what was handed back is nothing that could be judged
            why = trial.printable(f"what the answer returned cannot be judged ({type(error).__name__}: {error})")
            judge.failed(Outcome(failure=why[:300]))
            break
    return result(exercise, judge, printed)


def result(exercise: Exercise, judge: Judge, printed: str = "") -> Result:
    """The mark: points of passed checks, of all points."""
    checks = list(judge.checks.values())
    for check in checks:
        if not check.seen:
            check.passed, check.message = False, "not reached"
        elif judge.another_kind and check.passed:
            check.passed, check.message = False, "not judged: what was returned is of another kind"
    points = sum(check.points for check in checks if check.passed)
    told = [{"name": c.name, "passed": c.passed, "message": c.message, "points": c.points} for c in checks]
    return Result(exercise.name, round(100 * points / sum(check.points for check in checks)), told, printed=printed)
