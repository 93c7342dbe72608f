"""`minipar book`: the course as a site to read, with what its cells have shown; animations play without a kernel.

Idea    Every lesson is run from a clean kernel, and its outputs become pages. Pictures, animations and steppers are in
        the page already; a widget that needs a kernel is shown as it began. Nothing is fetched from elsewhere, so the
        folder can be opened from a disk, sent by mail or put on any server.
Source  Sphinx with myst-nb makes the pages, furo is a theme that reads well on a phone: three kept tools, where a
        generator of our own would be a fourth.
Read    `course.py` before.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from time import perf_counter
from typing import Any

from minipar import course

MARK = ".minipar-book"  # in a folder that may be replaced, since it is a site that was built here
WIDGET = "application/vnd.jupyter.widget-view+json"
CONFIG = """
project = "minipar"
html_title = "minipar: distributed training, by running it"
extensions = ["myst_nb"]
nb_execution_mode = "off"
nb_ipywidgets_js = {}
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_copy_source = False
html_show_sphinx = False
"""
PARTLY = 'suppress_warnings = ["myst.xref_missing"]  # links to lessons that are left out'
CSS = """
.cell_output { background: #fff; color: #1f2328; overflow-x: auto; padding: 4px; border-radius: 4px; }
.cell_output svg[role="img"] { min-width: min(640px, 200vw); }
.cell_output .output.text_html table { font-size: 14px; }
"""
INTRODUCTION = """# Distributed training, by running it

Twelve lessons on data, tensor and pipeline parallelism, ZeRO and their composition. Everything on these pages was run,
on real ranks; in JupyterLab you run it yourself: `minipar lab`.

"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minipar book`."""
    parser.add_argument("folder", help="to write, new or made by an earlier minipar book")
    parser.add_argument("--lessons", default="", metavar="NUMBERS", help="some of them, by comma: 0,4")


def command(options: argparse.Namespace) -> int:
    """`minipar book`"""
    out = Path(options.folder)
    check_place(out)
    check_tools()
    some = course.chosen(options.lessons)
    books = {}
    for lesson in some:
        start = perf_counter()
        print(f"{lesson.title} ...", end=" ", flush=True)
        books[lesson.path.stem] = course.run(lesson.path)
        print(f"{perf_counter() - start:.0f} s", flush=True)
    build(some, books, out)
    print(f"written: {out / 'index.html'}")
    return 0


def check_place(out: Path) -> None:
    """Raise `ValueError`, one line, unless the site may be put there."""
    if out.exists() and not (out / MARK).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there and is no site of minipar book: name a new folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise ValueError(f"cannot write into {out.parent} ({error.strerror}): name another folder") from None


def check_tools() -> None:
    """Raise `ValueError`, one line, if what makes the pages is not installed."""
    try:
        import furo  # type: ignore[import-untyped] # noqa: F401
        import myst_nb  # type: ignore[import-untyped] # noqa: F401
    except ImportError:
        raise ValueError("minipar book needs Sphinx, myst-nb and furo: pip install -e '.[book]'") from None


def build(some: Sequence[course.Lesson], books: dict[str, Any], out: Path) -> None:
    """Pages of notebooks that have run, whole or not at all. Raises `ValueError`, one line, if they cannot be made."""
    import nbformat
    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".minipar-book-") as folder:
        source, site = Path(folder) / "source", Path(folder) / "site"
        (source / "_static").mkdir(parents=True)
        all_there = len(books) == len(course.lessons(some[0].path.parent))
        (source / "conf.py").write_text(CONFIG + ("" if all_there else PARTLY))
        (source / "_static" / "book.css").write_text(CSS)
        (source / "index.md").write_text(index(some), encoding="utf-8")
        for name, book in books.items():
            nbformat.write(still(book), source / f"{name}.ipynb")
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tools' own, of each other's age
            code = build_main(["-b", "html", "-q", "-W", "--keep-going", str(source), str(site)])
        if code:
            raise ValueError(f"the pages could not be made: {' '.join(said.getvalue().split())[-400:]}")
        (site / MARK).write_text("")
        if out.exists():
            shutil.rmtree(out)
        site.rename(out)


def index(some: Sequence[course.Lesson]) -> str:
    """The first page: every lesson with its question."""
    rows = [f"- [{lesson.title}]({lesson.path.name})\\\n  {lesson.question}" for lesson in some]
    tree = "\n".join(lesson.path.stem for lesson in some)
    return INTRODUCTION + "\n".join(rows) + f"\n\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n"


def still(book: Any) -> Any:
    """The notebook without what needs a kernel: of a widget, its other form."""
    book.metadata.pop("widgets", None)
    for cell in book.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if WIDGET in data and "text/html" in data:
                del data[WIDGET]
        if cell.cell_type == "markdown":  # exercises are done, not read: their files are no pages
            cell.source = re.sub(r"\[([^]]+)\]\(\.\./exercises/[^)]+\)", r"\1", cell.source)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_over(output)]
    return book


def _is_over(output: Any) -> bool:
    """An output that was replaced by nothing: the line of a cell that took long."""
    return output.get("data", {}).get("text/html") == ""
