"""A folder of submissions: each graded alone, results kept as they come, and written in the forms that others read.

    submissions/anna/01_ring_all_reduce.py        results/marks.csv           a row for each student
    submissions/anna/03_average_gradients.py      results/checks.csv          which check failed how often
    submissions/ben/...                           results/anna/feedback.md    what the student reads, also .html
                                                  results/anna/results.json   for Gradescope
                                                  results/anna/classroom.json for GitHub Classroom

Idea    A student is a folder. Nothing in it is run but the files that are named as exercises; links are not followed.
        What is graded already, with the same text, seed and checks, is not graded again, so an interrupted run goes on.
Source  Gradescope: gradescope-autograders.readthedocs.io, 'Output format'. GitHub Classroom: the result that its test
        runners hand to the autograding reporter, version 1.
Read    `exercise.py` before.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from html import escape
from pathlib import Path
from threading import Event
from typing import Any

from minipar.files import as_json, write_whole
from minipar.grade import exercise, trial, walls
from minipar.grade.exercise import Exercise, Result

WORKERS = 2
DONE = "done.json"
Marks = dict[str, Any]  # of a student: "student", "results" by exercise


@dataclass(frozen=True)
class How:
    """How a class is graded: the seed of the cases, seconds for each, and whether behind the kernel's walls."""

    seed: int = 0
    seconds: float = trial.SECONDS
    isolate: bool = False


def command(submissions: Path, out: Path, how: How) -> int:
    """`minipar grade submissions/ --out results/`"""
    students = sorted(path for path in submissions.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not students:
        raise ValueError(f"{submissions} has no submissions: it needs a folder for each student")
    if out.resolve().is_relative_to(submissions.resolve()) or submissions.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"{out} and {submissions} lie in each other: name another folder for the results")
    check_place(out)
    every, stop = exercise.every(), Event()
    marks: dict[str, Marks] = {}
    with ThreadPoolExecutor(WORKERS) as pool:
        work = {pool.submit(student_marks, path, out, every, how, stop): path.name for path in students}
        try:
            for number, done in enumerate(as_completed(work), 1):
                marks[work[done]] = done.result()
                name, reached = trial.printable(work[done]), mean(marks[work[done]], every)
                print(f"{number:>4} of {len(students)}  {name[:40]:<40} {reached:5.1f}", flush=True)
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    write_class(out, [marks[path.name] for path in students], every)
    print(f"written: {out / 'marks.csv'}, {out / 'checks.csv'} and a folder for each of {len(students)} students")
    return 0


def check_place(out: Path) -> None:
    """Raise `ValueError`, one line, unless results can be written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"cannot write into {out} ({error.strerror}): name another folder") from None


def student_marks(path: Path, out: Path, every: Sequence[Exercise], how: How, stop: Event) -> Marks:
    """All exercises of a student, from what is kept, or graded now and kept."""
    folder = out / safe_name(path.name)
    folder.mkdir(exist_ok=True)
    answers = {one.name: answer_of(path, one) for one in every}
    mark = fingerprint(answers, every, how.seed)
    kept = _kept(folder / DONE, mark)
    if kept is not None:
        return kept
    results: dict[str, Any] = {}
    with trial.Nursery((*walls.HIDDEN, path.parent, out) if how.isolate else None) as nursery:
        for one in every:
            if stop.is_set():
                raise KeyboardInterrupt
            results[one.name] = _as_dict(graded(one, answers[one.name], how, nursery))
    marks: Marks = {"student": trial.printable(path.name), "results": results}
    write_student(folder, marks, every)
    write_whole(str(folder / DONE), as_json({"fingerprint": mark, **marks}, indent=1))
    return marks


def graded(one: Exercise, answer: tuple[str, str], how: How, nursery: trial.Nursery) -> Result:
    """An answer's result, or why there is none."""
    text, reason = answer
    if not reason:
        return exercise.grade(one, text, how.seed, nursery, how.seconds)
    failed = {"passed": False, "message": reason}
    checks = [{"name": name, "points": points, **failed} for name, points in one.checks.items()]
    return Result(one.name, 0, checks, reason)


def answer_of(student: Path, one: Exercise) -> tuple[str, str]:
    """The text of an answer and "", or "" and why there is none."""
    found = [path for path in sorted(student.rglob(f"{one.name}.*")) if path.suffix in (".py", ".ipynb")]
    if not found:
        return "", "missing: there is no file of this name"
    path = found[0]
    if path.is_symlink() or not path.resolve().is_relative_to(student.resolve()):
        return "", "this is a link, which is not followed: hand in the file itself"
    try:
        return exercise.read(path), ""
    except ValueError as error:
        return "", str(error).replace(str(path), path.name)


def fingerprint(answers: dict[str, tuple[str, str]], every: Sequence[Exercise], seed: int) -> str:
    """Changes with the answers, the checks and the seed."""
    checks = {one.name: (walls.CHECKS / f"{one.name}.py").read_text(encoding="utf-8") for one in every}
    return hashlib.sha256(json.dumps([seed, answers, checks]).encode("utf-8", "surrogatepass")).hexdigest()


def _kept(path: Path, mark: str) -> Marks | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return {"student": kept["student"], "results": kept["results"]} if kept["fingerprint"] == mark else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _as_dict(result: Result) -> dict[str, Any]:
    return {"score": result.score, "reason": result.reason, "checks": result.checks}


def safe_name(name: str) -> str:
    """A name for a folder that cannot lead elsewhere, different for different students."""
    plain = re.sub(r"[^\w-]+", "_", name)[:60].strip("_")
    mark = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return plain if plain == name else f"{plain or 'student'}-{mark}"


def mean(marks: Marks, every: Sequence[Exercise]) -> float:
    """Over all exercises, from 0 to 100."""
    return float(sum(marks["results"][one.name]["score"] for one in every) / len(every))


# What others read.


def write_class(out: Path, marks: Sequence[Marks], every: Sequence[Exercise]) -> None:
    """The tables of the class."""
    rows = [["student", "mean", *(one.name for one in every), "missing"]]
    for one in marks:
        missing = [name for name, found in one["results"].items() if found["reason"].startswith("missing")]
        scores = [str(one["results"][task.name]["score"]) for task in every]
        rows.append([trial.printable(one["student"]), f"{mean(one, every):.1f}", *scores, " ".join(missing)])
    write_whole(str(out / "marks.csv"), as_csv(rows))
    failed: Counter[tuple[str, str]] = Counter()
    tried: Counter[str] = Counter()
    for one in marks:
        for name, found in one["results"].items():
            tried[name] += not found["reason"].startswith("missing")
            if not found["reason"].startswith("missing"):
                failed.update((name, check["name"]) for check in found["checks"] if not check["passed"])
    table = [["exercise", "check", "failed", "of"]]
    for task in every:
        table += [[task.name, check, str(failed[task.name, check]), str(tried[task.name])] for check in task.checks]
    write_whole(str(out / "checks.csv"), as_csv(table))


def as_csv(rows: Sequence[Sequence[str]]) -> str:
    """For spreadsheets: what one would take for a formula is made text."""
    text = io.StringIO()
    guarded = [["'" + cell if cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell for cell in row] for row in rows]
    csv.writer(text, lineterminator="\r\n").writerows(guarded)
    return text.getvalue()


def write_student(folder: Path, marks: Marks, every: Sequence[Exercise]) -> None:
    """Feedback to read, and the results for Gradescope and GitHub Classroom."""
    write_whole(str(folder / "feedback.md"), feedback(marks, every))
    write_whole(str(folder / "feedback.html"), feedback_page(marks, every))
    write_whole(str(folder / "results.json"), as_json(gradescope(marks, every), indent=1))
    write_whole(str(folder / "classroom.json"), as_json(github(marks, every), indent=1))


def feedback(marks: Marks, every: Sequence[Exercise]) -> str:
    """In Markdown; what answers have printed or called themselves is shown as it is, and never as markup."""
    lines = [f"# Feedback: {mean(marks, every):.1f} of 100", ""]
    for one in every:
        found = marks["results"][one.name]
        lines.append(f"## {one.title}: {found['score']}")
        for check in found["checks"]:
            said = f": `{' '.join(check['message'].split()).replace('`', chr(39))}`" if check["message"] else ""
            lines.append(f"- {'passed' if check['passed'] else 'failed'}: {check['name']}{said}")
        lines.append("")
    return "\n".join(lines)


def feedback_page(marks: Marks, every: Sequence[Exercise]) -> str:
    """The same as a page that stands alone."""
    parts = [f"<h1>Feedback: {mean(marks, every):.1f} of 100</h1>"]
    for one in every:
        found = marks["results"][one.name]
        parts.append(f"<h2>{escape(one.title)}: {found['score']}</h2><ul>")
        for check in found["checks"]:
            said = f"<br><code>{escape(check['message'])}</code>" if check["message"] else ""
            parts.append(f"<li>{'passed' if check['passed'] else 'failed'}: {escape(check['name'])}{said}</li>")
        parts.append("</ul>")
    head = '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Feedback</title></head>'
    style = "font:16px system-ui,sans-serif;max-width:50em;margin:2em auto"
    return f'{head}<body style="{style}">{"".join(parts)}</body></html>\n'


def _points(check: dict[str, Any], found: dict[str, Any]) -> float:
    return 100 * float(check["points"]) / sum(float(one["points"]) for one in found["checks"])


def gradescope(marks: Marks, every: Sequence[Exercise]) -> dict[str, Any]:
    """results.json: a test for each check; their scores add up to 100 for each exercise."""
    tests = [
        {
            "name": f"{one.title}: {check['name']}",
            "number": f"{int(one.name[:2])}.{place}",
            "score": round(_points(check, found) if check["passed"] else 0.0, 2),
            "max_score": round(_points(check, found), 2),
            "status": "passed" if check["passed"] else "failed",
            "output": check["message"],
            "output_format": "text",
            "visibility": "visible",
        }
        for one in every
        for found in [marks["results"][one.name]]
        for place, check in enumerate(found["checks"], 1)
    ]
    return {"output_format": "text", "visibility": "visible", "tests": tests}


def github(marks: Marks, every: Sequence[Exercise]) -> dict[str, Any]:
    """The result of a test runner, which the reporter of GitHub Classroom adds up: a test for each exercise."""
    tests = [
        {
            "name": one.title,
            "status": "pass" if found["score"] == 100 else "fail",
            "message": "; ".join(check["message"] for check in found["checks"] if not check["passed"]) or None,
            "score": found["score"],
            "test_code": f"minipar grade {int(one.name[:2])}",
            "filename": f"{one.name}.py",
            "line_no": 0,
            "execution_time": "0s",
        }
        for one in every
        for found in [marks["results"][one.name]]
    ]
    whole = all(test["status"] == "pass" for test in tests)
    return {"version": 1, "status": "pass" if whole else "fail", "max_score": 100 * len(tests), "tests": tests}
