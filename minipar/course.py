"""The lessons as files: where they are, what they are called, and how they are run from a clean kernel.

Idea    Lessons are plain notebooks without outputs: a learner opens them with a double click, a reviewer reads prose
        and code in the difference of two versions, and no second text has to be kept equal. A test holds them to it.
Source  nbformat and nbclient, Jupyter's own libraries, read and run them.
Read    `lab_command.py` and `book_command.py`, which open them and make a site of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "lessons"
LONGEST = 300  # seconds of a cell
QUIET = ["--log-level=40"]  # the kernel warns of its own transport, which is on loopback


@dataclass(frozen=True)
class Lesson:
    """A notebook: its file, its number and title ("4. Pipeline parallel"), and the question with which it opens."""

    path: Path
    title: str
    question: str


def lessons(folder: Path = FOLDER) -> list[Lesson]:
    """All lessons, in reading order. Raises `ValueError`, one line, if there are none."""
    found = sorted(folder.glob("[0-9][0-9]_*.ipynb")) if folder.is_dir() else []
    if not found:
        raise ValueError(f"no lessons in {folder}: they come with the repository, so install it with pip install -e .")
    return [_lesson(path) for path in found]


def chosen(numbers: str, folder: Path = FOLDER) -> list[Lesson]:
    """Lessons by number, such as "0,4"; all, for "". Raises `ValueError` for a number that there is not."""
    every = lessons(folder)
    if not numbers:
        return every
    by_number = {str(int(lesson.path.name[:2])): lesson for lesson in every}
    wanted = [part.strip() for part in numbers.split(",")]
    missing = [part for part in wanted if _plain(part) not in by_number]
    if missing:
        raise ValueError(f"there is no lesson {', '.join(map(repr, missing))}: choose from {', '.join(by_number)}")
    return [by_number[_plain(part)] for part in wanted]


def _plain(number: str) -> str:
    return str(int(number)) if number.isascii() and number.isdigit() else number


def read(path: Path) -> Any:
    """The notebook. Raises `ValueError`, one line, for a file that is none."""
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:
        raise ValueError(f"{path} is no notebook ({' '.join(str(error).split())[:120]}): restore it") from None


def run(path: Path) -> Any:
    """The notebook as it is after all of its cells have run in a fresh kernel. Raises `ValueError` naming the cell that
    failed."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    book = read(path)
    where = {"metadata": {"path": str(path.parent)}}
    try:
        NotebookClient(book, timeout=LONGEST, resources=where, record_timing=True, extra_arguments=QUIET).execute()
    except (CellExecutionError, CellTimeoutError) as error:
        failed = next(n for n, cell in enumerate(book.cells) if _has_failed(cell) or _has_not_run(cell))
        first = book.cells[failed].source.splitlines()[0]
        raise ValueError(f"{path.name}, cell {failed} ({first}): {' '.join(str(error).split())[-300:]}") from None
    return book


def _has_failed(cell: Any) -> bool:
    return any(output.output_type == "error" for output in cell.get("outputs", ()))


def _has_not_run(cell: Any) -> bool:
    return cell.cell_type == "code" and cell.execution_count is None


def _lesson(path: Path) -> Lesson:
    first = next((cell.source for cell in read(path).cells if cell.cell_type == "markdown"), "")
    title = re.search(r"^# (.+)$", first, re.MULTILINE)
    question = re.search(r"^\*\*(.+\?)\*\*", first, re.MULTILINE)
    return Lesson(path, title[1] if title else path.stem, question[1] if question else "")
