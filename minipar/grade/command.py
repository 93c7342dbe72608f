"""`minipar grade` and `minipar exercises`: one answer, a class of them, and a learner's own progress."""

from __future__ import annotations

import argparse
import difflib
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from minipar.arguments import in_torchrun, number
from minipar.files import as_json, check_writable, write_whole
from minipar.grade import progress, walls
from minipar.grade.nurse import Nursery

if TYPE_CHECKING:
    from minipar.grade.exercise import Exercise, Result

WIDTH, SECONDS = 80, 10.0


def add_grade_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minipar grade`."""
    parser.add_argument("what", help="an exercise, by number or name; all of yours: all; or a folder of submissions")
    parser.add_argument("file", nargs="?", help="the answer; by default the file in exercises/")
    parser.add_argument("--seed", type=number(0), help="of the cases; by default another one each time (a class: 0)")
    parser.add_argument("--seconds", type=number(1, float, 600), default=SECONDS, help="of a case (default 10)")
    parser.add_argument("--out", metavar="FOLDER", help="for a folder of submissions: where the results go")
    parser.add_argument("--isolate", action="store_true", help="behind the kernel's walls; needs bubblewrap")
    parser.add_argument("--report", metavar="FILE", help="write the result as JSON")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")


def grade(options: argparse.Namespace) -> int:
    """`minipar grade`: 0 for full marks, 1 for less, 2 for what cannot be graded."""
    if options.isolate:
        walls.check()
    if in_torchrun():
        raise ValueError("minipar grade starts ranks of its own: call it without torchrun")
    if options.what and Path(options.what).is_dir():
        from minipar.grade import classroom

        if not options.out:
            raise ValueError(f"{options.what} is a folder of submissions: add --out FOLDER for the results")
        how = classroom.How(options.seed or 0, options.seconds, options.isolate)
        return classroom.command(Path(options.what), Path(options.out), how)
    if options.out:
        raise ValueError("--out is for a folder of submissions: use --report FILE for one answer")
    return grade_own(options)


def grade_own(options: argparse.Namespace) -> int:
    """One answer, or all that are in exercises/. The process that runs them is started first: it imports torch, too."""
    check_writable(options.report)
    if options.what == "all" and options.file:
        raise ValueError("all grades every file in exercises/: leave out the file, or name one exercise")
    with Nursery(walls.HIDDEN if options.isolate else None) as nursery:
        from minipar.grade import exercise

        some = exercise.every() if options.what == "all" else [exercise.find(options.what)]
        answers = [(one, exercise.read(Path(options.file) if options.file else one.file)) for one in some]
        seed = secrets.randbelow(2**31) if options.seed is None else options.seed
        facts, passed = [], True
        for one, source in answers:
            result = exercise.grade(one, source, seed, nursery, options.seconds)
            progress.note(one.name, result.score)
            facts.append(as_dict(result) | {"seed": seed})
            passed &= result.passed
            if not options.json:
                print(told(one, result) if options.what != "all" else f"{one.name:<36} {result.score:>3}", flush=True)
    answer: Any = facts if options.what == "all" else facts[0]
    if options.report:
        write_whole(options.report, as_json(answer, indent=1))
    if options.json:
        print(as_json(answer, indent=1), end="")
    return 0 if passed else 1


def as_dict(result: Result) -> dict[str, Any]:
    """What programs read."""
    found: dict[str, Any] = {"exercise": result.exercise, "score": result.score, "checks": result.checks}
    return found | ({"reason": result.reason} if result.reason else {})


def told(one: Exercise, result: Result) -> str:
    """What people read, in at most 80 columns."""
    lines = [f"{int(one.name[:2])}. {one.title}: {result.score} of 100"]
    for check in result.checks:
        lines.append(fill(f"{'ok  ' if check['passed'] else 'NO  '}{check['name']}", WIDTH, subsequent_indent="    "))
        if check["message"]:
            lines.append(fill(check["message"], WIDTH, initial_indent="      ", subsequent_indent="      "))
    if result.printed:
        shown = result.printed.splitlines()[:10]
        lines += ["what it printed:", *(f"  {line[: WIDTH - 2]}" for line in shown)]
    if result.passed:
        lines.append(f"Done. Compare with ours: minipar exercises {int(one.name[:2])} --solution")
    elif any("NotImplementedError" in check["message"] for check in result.checks):
        lines.append(f"Write your answer into {one.file.name}; minipar exercises {int(one.name[:2])} --hint helps.")
    return "\n".join(lines)


# minipar exercises


def add_exercises_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minipar exercises`."""
    parser.add_argument("exercise", nargs="?", help="one of them, by number or name")
    parser.add_argument("--hint", action="store_true", help="its next hint")
    parser.add_argument("--solution", action="store_true", help="ours beside yours, once yours has passed")
    parser.add_argument("--release", metavar="FOLDER", help="copy the exercises alone, to give them out")
    parser.add_argument("--json", action="store_true", help="print the list as JSON, and nothing else")


def exercises(options: argparse.Namespace) -> int:
    """`minipar exercises`"""
    from minipar.grade import exercise

    if options.release:
        return release(Path(options.release))
    if options.exercise is None:
        if options.hint or options.solution:
            raise ValueError("a hint or a solution of which exercise? For example: minipar exercises 1 --hint")
        return show_list(options.json)
    one = exercise.find(options.exercise)
    if options.hint:
        print(next_hint(one))
    elif options.solution:
        print(solution(one))
    else:
        print(one.file.read_text(encoding="utf-8"), end="")
    return 0


def show_list(as_program: bool) -> int:
    """Every exercise with its best mark, and which one comes next."""
    from minipar.grade import exercise

    known = progress.load()
    every = exercise.every()
    marks = {one.name: known.get(one.name, progress.Entry()) for one in every}
    if as_program:
        rows = [
            {"exercise": one.name, "title": one.title, "passed": marks[one.name].score == 100,
             "score": marks[one.name].score, "minutes": one.minutes, "lesson": one.lesson}
            for one in every
        ]  # fmt: skip
        print(as_json(rows, indent=1), end="")
        return 0
    for one in every:
        entry = marks[one.name]
        mark = "passed" if entry.score == 100 else f"{entry.score}" if entry.tries else ""
        print(f"{int(one.name[:2]):>2}  {one.title[:46]:<46} {one.minutes:>3} min  lesson {one.lesson:>2}  {mark}")
    following = next((one for one in every if marks[one.name].score < 100), None)
    done = sum(entry.score == 100 for entry in marks.values())
    print(f"\n{done} of {len(every)} passed." + (f" Next: minipar grade {int(following.name[:2])}, after writing "
          f"exercises/{following.name}.py" if following else ""))  # fmt: skip
    return 0


def next_hint(one: Exercise) -> str:
    """One more hint than last time; after the last one, all of them again."""
    known = progress.load()
    entry = known.setdefault(one.name, progress.Entry())
    entry.hints = min(entry.hints + 1, len(one.hints))
    progress.save(known)
    shown = one.hints[: entry.hints]
    hints = [fill(f"{n}. {hint}", WIDTH, subsequent_indent="   ") for n, hint in enumerate(shown, 1)]
    left = len(one.hints) - len(shown)
    return "\n".join([*hints, f"({left} more)" if left else "(that was the last)"])


def solution(one: Exercise) -> str:
    """Ours, and how yours differs from it, line by line. Raises `ValueError` before yours has passed."""
    from minipar.grade import exercise

    path = walls.SOLUTIONS / f"{one.name}.py"
    if not path.is_file():
        raise ValueError(f"the solution of {one.name} is not part of this release")
    if progress.load().get(one.name, progress.Entry()).score < 100:
        raise ValueError(f"our solution is shown once yours has passed: minipar grade {int(one.name[:2])}")
    ours, yours = path.read_text(encoding="utf-8"), exercise.read(one.file)
    different = difflib.unified_diff(yours.splitlines(), ours.splitlines(), "yours", "ours", lineterm="")
    return f"{ours}\n" + "\n".join(different)


def release(folder: Path) -> int:
    """Copy what students need. Raises `ValueError` for a folder that is not empty."""
    from minipar.grade import exercise

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and not empty: name a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files: Sequence[Path] = [one.file for one in exercise.every()]
        for file in files:
            shutil.copyfile(file, folder / file.name)
    except OSError as error:
        raise ValueError(f"cannot write into {folder} ({error.strerror}): name another folder") from None
    print(f"written: {len(files)} exercises in {folder}")
    return 0
