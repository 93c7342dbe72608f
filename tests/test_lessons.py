"""The lessons: how they are written, that each runs from a clean kernel, and what their helpers do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from minipar import cli, course, guess, lesson, show
from minipar.grade import exercise

LESSONS = course.lessons()
CELL, LINE = 24, 120  # lines of a cell, characters of a line of code

every = pytest.mark.parametrize("one", LESSONS, ids=lambda one: one.path.stem)


def sources(one: course.Lesson, kind: str) -> list[str]:
    return [cell.source for cell in course.read(one.path).cells if cell.cell_type == kind]


# How they are written.


def test_there_are_twelve_in_reading_order() -> None:
    assert [int(one.title.partition(".")[0]) for one in LESSONS] == list(range(12))


@every
def test_a_lesson_is_kept_without_outputs(one: course.Lesson) -> None:
    """Clear them with: jupyter nbconvert --clear-output --inplace lessons/*.ipynb"""
    book = course.read(one.path)
    for cell in book.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None and not cell.metadata
    assert len({cell.id for cell in book.cells}) == len(book.cells)
    assert "widgets" not in book.metadata


@every
def test_a_lesson_opens_with_a_question_and_closes_with_what_can_be_said(one: course.Lesson) -> None:
    first, *_, last = sources(one, "markdown")
    assert re.match(r"# \d+\. \S", first) and one.question
    said, _, traps = last.partition("## What you can now say")[2].partition("**Traps**")
    assert len(re.findall(r"^- ", said, re.MULTILINE)) == 3
    assert len(re.findall(r"^- ", traps.partition("**Next:**")[0], re.MULTILINE)) in (2, 3)


@every
def test_cells_are_short_and_guesses_are_answered(one: course.Lesson) -> None:
    code = "\n".join(sources(one, "code"))
    for cell in sources(one, "code"):
        assert len(cell.splitlines()) <= CELL, cell
        assert max(map(len, cell.splitlines())) <= LINE, max(cell.splitlines(), key=len)
    asked = re.findall(r'lesson\.guess\(\s*"([^"]+)"', code)
    answered = re.findall(r'lesson\.reveal\(\s*"([^"]+)"', code)
    assert asked == answered and len(asked) >= 2 and len(set(asked)) == len(asked)


@every
def test_links_lead_somewhere(one: course.Lesson) -> None:
    for text in sources(one, "markdown"):
        for target in re.findall(r"\]\(([^)]+)\)", text):
            assert target.startswith("https://") or (one.path.parent / target.partition("#")[0]).exists(), target


def test_every_exercise_is_named_by_its_lesson() -> None:
    closing = {int(one.path.name[:2]): sources(one, "markdown")[-1] for one in LESSONS}
    for task in exercise.every():
        assert f"[{int(task.name[:2])}. {task.title}](../exercises/{task.name}.py)" in closing[task.lesson]


# That they run.


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One cache for all lessons, and not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIPAR_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@every
@pytest.mark.slow
def test_a_lesson_runs_from_a_clean_kernel_without_a_warning(
    one: course.Lesson, cache: None, books: dict[str, Any]
) -> None:
    book = books[one.path.stem] = course.run(one.path)
    for cell in book.cells:
        for output in cell.get("outputs", ()):
            text = output.get("text", "")
            assert output.output_type != "stream" or output.name == "stdout", (cell.source, text)
            assert not re.search(r"\bwarning\b", text, re.IGNORECASE), (cell.source, text)
    assert any(cell.outputs for cell in book.cells if cell.cell_type == "code")


# What they call.


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "text").mkdir()
    for number in range(3):
        words = " ".join(f"word{(7 * number + 3 * i) % 97} stands{i % 13}" for i in range(400))
        (tmp_path / "text" / f"{number}.txt").write_text(words)
    monkeypatch.setenv("MINIPAR_CACHE", str(tmp_path / "cache"))
    sizes = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 300, "sequence": 16, "global_batch": 8}
    return {**sizes, "steps": 3, "data": str(tmp_path / "text")}


def test_training_in_a_cell_leaves_losses_messages_spans_and_memory(small: dict[str, Any]) -> None:
    alone, run = lesson.train(**small), lesson.train(dp=2, pp=2, **small)
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    assert run.bytes("dp") == run.traffic()["dp", "all_reduce"].bytes == run.held()["gradients"]
    assert run.calls("dp", "all_reduce") == 1 and alone.bytes("dp") == 0
    spans, messages = run.rank(0)
    assert len(spans) == 2 * 4 and {message.group for message in messages} == {"pp", "dp", "world"}
    measured, predicted = run.timelines()
    assert measured.ranks == predicted.ranks == 2
    assert [step["step"] for step in run.log] == [0, 1, 2]
    drawing = show.messages({"rank 0": (spans, messages)})
    sent = [message for message in messages if message.group != "world"]
    assert drawing.title.startswith(f"{len(sent)} messages, on their way for ")
    assert drawing.description.count("waited for") == min(12, len(sent))


def test_faults_and_restarts_are_in_the_log(
    small: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["nan@1:rank0", "kill@3:rank1"]
    run = lesson.train(dp=2, faults=wrong, **{**small, "steps": 5}, save=str(tmp_path / "s"), save_every=2, restarts=1)
    assert [step["step"] for step in run.log if step.get("restarted")] == [2]
    assert [step["step"] for step in run.log if step["skipped"]] == [1]
    assert "rank 1 was killed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [({"micro_batch": 2}, "do you mean micro_batches"), ({"dp": 3}, "a multiple of 3"), ({"xyz": 1}, "see help")],
)
def test_what_cannot_be_trained_is_said_in_a_line(small: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as told:
        lesson.train(**{**small, **options})
    assert "\n" not in str(told.value)


def test_a_guess_is_answered_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guess, "_asked", {})
    widget = guess.guess("k", "How many?", ["one", "two"])
    assert "How many?" in widget._repr_mimebundle_()["text/html"]
    assert "It is two" in repr(guess.reveal("k", "two", "it was counted")) and guess.score() == (0, 0)
    radio = widget.children[1]
    radio.value = "two"
    assert "guessed right" in repr(guess.reveal("k", "two")) and guess.score() == (1, 1)
    radio.value = "one"
    assert "You guessed one" in repr(guess.reveal("k", "two")) and guess.score() == (0, 1)


def test_a_guess_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guess, "_asked", {})
    for choices in (["one"], ["one", "one"]):
        with pytest.raises(ValueError, match="at least two choices, all different"):
            guess.guess("k", "?", choices)
    with pytest.raises(ValueError, match="run the cell with guess"):
        guess.reveal("other", "one")
    guess.guess("k", "?", ["one", "two"])
    with pytest.raises(ValueError, match="none of the choices"):
        guess.reveal("k", "three")


# The commands.


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    return error


def test_a_lesson_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "there is no lesson '40': choose from 0, 1, 2" in told(capsys, "lab", "40")
    assert "there is no lesson 'x'" in told(capsys, "book", str(tmp_path / "b"), "--lessons", "0,x")
    assert not (tmp_path / "b").exists()


def test_a_folder_that_is_no_site_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    for place in (tmp_path, tmp_path / "mine"):
        assert "is no site of minipar book" in told(capsys, "book", str(place))
    assert (tmp_path / "mine").read_text() == "x"


def test_a_notebook_that_is_broken_or_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "00_x.ipynb").write_text("{")
    with pytest.raises(ValueError, match="is no notebook"):
        course.lessons(tmp_path)
    with pytest.raises(ValueError, match="no lessons in"):
        course.lessons(tmp_path / "nothing")
