"""What goes wrong on purpose, the signal that the log shows of it, and the remedy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest

from minipar import cli, inject, metrics, report, show
from minipar.inject import Fault

SMALL = ("--layers", "2", "--hidden", "16", "--heads", "2", "--vocab", "300", "--sequence", "16", "--global-batch", "8")
Run = Callable[..., tuple[int, dict[str, Any], list[dict[str, Any]], str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Train with a log: exit code, report, the lines of the log, and what was printed."""
    (tmp_path / "text").mkdir()
    for number in range(6):
        words = " ".join(f"word{(7 * number + 3 * i) % 97} stands{i % 13}" for i in range(400))
        (tmp_path / "text" / f"{number}.txt").write_text(words)
    monkeypatch.setenv("MINIPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(*options: str) -> tuple[int, dict[str, Any], list[dict[str, Any]], str]:
        for name in ("r.json", "log.jsonl"):
            Path(name).unlink(missing_ok=True)
        with pytest.raises(SystemExit) as end:
            cli.main(["train", *SMALL, "--data", "text", "--report", "r.json", "--log", "log.jsonl", *options])
        out = capfd.readouterr()
        made = json.loads(Path("r.json").read_text()) if Path("r.json").exists() else {}
        log = Path("log.jsonl")
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return int(end.value.code or 0), made, lines, out.out + out.err

    return run


# Signals and remedies.


@pytest.mark.parametrize("degrees", [("--dp", "2"), ("--pp", "2"), ("--tp", "2"), ("--dp", "2", "--zero", "2")])
def test_a_rank_whose_gradients_are_no_numbers_makes_all_skip_one_step(run: Run, degrees: tuple[str, ...]) -> None:
    code, made, lines, _ = run(*degrees, "--steps", "6", "--inject", "nan@3:rank1")
    assert code == 0 and made["skipped_steps"] == [3]
    assert [line["skipped"] for line in lines] == [False, False, False, True, False, False]
    assert lines[3]["grad_norm"] is None and all(line["loss"] is not None for line in lines)


def test_a_killed_rank_is_named_and_the_run_goes_on_as_if_it_had_not_been(run: Run) -> None:
    _, whole, _, _ = run("--dp", "2", "--steps", "10")
    code, made, lines, printed = run("--dp", "2", "--steps", "10", "--save", "kept", "--save-every", "2",
                                     "--restarts", "1", "--inject", "kill@5:rank1")  # fmt: skip
    assert code == 0 and "rank 1 was killed by signal 9 (SIGKILL)" in printed
    assert [line["step"] for line in lines if "step" in line and "loss" in line] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9]
    restart = next(line for line in lines if line.get("event") == "restart")
    assert restart["step"] == 4 and "rank 1" in restart["reason"]
    assert made["losses"] == whole["losses"][4:] and made["grad_norms"] == whole["grad_norms"][4:]


def test_without_restarts_left_a_killed_rank_ends_the_run(run: Run) -> None:
    code, made, lines, printed = run("--dp", "2", "--steps", "6", "--inject", "kill@2:rank0")
    assert code == 1 and not made and "rank 0 was killed" in printed and len(lines) == 2


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(run: Run, tmp_path: Path) -> None:
    wrong = ("--inject", "kill@3:rank1", "--inject", "corrupt-checkpoint")
    keep = ("--save", "kept", "--save-every", "2", "--restarts", "1")
    code, _, lines, printed = run("--dp", "2", "--steps", "6", *keep, *wrong)
    restart = next(line for line in lines if line.get("event") == "restart")
    assert code == 0 and restart["step"] == 0 and "step-00000002 is damaged" in restart["damaged"][0]
    assert "is damaged" in printed
    assert lines[-1]["step"] == 5


def test_a_loss_that_jumps_brings_back_the_weights_of_before(run: Run) -> None:
    options = ("--dp", "2", "--steps", "14", "--save", "kept", "--save-every", "2", "--warmup", "0", "--lr", "0.01")
    code, made, lines, printed = run(*options, "--rollback", "1.3", "--inject", "spike@8")
    steps = [line for line in lines if "loss" in line and "event" not in line]
    jumped = made["rollbacks"][0]
    assert code == 0 and jumped == 9 and "back to the weights of step 8" in printed
    assert steps[jumped]["loss"] > 1.3 * steps[jumped - 2]["loss"]
    assert steps[jumped + 1]["loss"] < 1.1 * steps[jumped - 2]["loss"]


def test_the_busiest_rank_is_the_one_that_the_others_wait_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, lines, _ = run("--dp", "3", "--global-batch", "9", "--micro-batches", "1", "--steps", "5",
                         "--inject", "slow@2:rank1")  # fmt: skip
    slow, others = lines[2], [line["step_seconds"]["max"] for line in lines if line["step"] != 2]
    assert slow["busiest_rank"] == 1
    assert slow["step_seconds"]["min"] > 0.8 * inject.SLEEP > max(others)
    assert slow["busy_seconds"]["median"] < 0.5 * inject.SLEEP < slow["busy_seconds"]["max"]


def test_a_log_has_rate_scale_memory_bytes_and_mfu(run: Run) -> None:
    options = ("--dp", "2", "--precision", "fp16", "--warmup", "2", "--peak-flops", "10GFLOP/s")
    _, made, lines, _ = run(*options, "--lr", "0.01", "--steps", "3")
    assert [line["lr"] for line in lines] == pytest.approx([0.005, 0.01, 0.01])
    assert lines[0]["loss_scale"] == 65536 and lines[0]["memory_bytes"] > 1e7
    counted = {f"{row['group']} {row['op']}": row["bytes_per_step"] for row in made["communication"]}
    assert lines[-1]["bytes"] == counted
    rate = lines[-1]["tokens_per_second"]
    assert lines[-1]["mfu"] == pytest.approx(made["flops_per_step"] * rate / made["tokens_per_step"] / 2 / 10e9)


@pytest.mark.slow
def test_after_many_steps_and_two_killed_ranks_all_is_as_if_nothing_had_been(run: Run) -> None:
    """Soak: replicas, stages and slices; at the end, memory is what it was, and nothing is left. MINIPAR_SOAK=500 makes
    it longer."""
    steps = int(os.environ.get("MINIPAR_SOAK", "150"))
    every, first, second = steps // 10, steps * 3 // 10 - 3, steps * 6 // 10 + 11
    shape = ("--dp", "2", "--tp", "2", "--pp", "2", "--zero", "1", "--steps", str(steps))
    run("--steps", "1")  # the server of ranks stays
    before = left_behind()
    _, whole, calm, _ = run(*shape)
    wrong = ("--inject", f"kill@{first}:rank6", "--inject", f"kill@{second}:rank1")
    keep = ("--save", "kept", "--save-every", str(every), "--save-aside", "--restarts", "2")
    code, made, lines, _ = run(*shape, *keep, *wrong)
    assert code == 0
    begins = [line["step"] for line in lines if line.get("event") == "restart"]
    for begin, killed in zip(begins, (first, second), strict=True):
        assert begin in (killed // every * every, killed // every * every - every)  # the last may not have been whole
    assert made["losses"] == whole["losses"][begins[1] :] and made["grad_norms"] == whole["grad_norms"][begins[1] :]
    for log in (calm, lines[begins[1] - steps :]):
        memory = [line["memory_bytes"] for line in log]
        assert memory[-1] < 1.02 * memory[len(memory) // 3]  # a save aside has been by then
    assert left_behind() == before
    print(f"{steps} steps, killed at {first} and {second}, restarted from {begins}: last loss {made['losses'][-1]} and "
          f"{whole['losses'][-1]}; memory {memory[len(memory) // 3]} to {memory[-1]} bytes; left {before}")  # fmt: skip


def left_behind() -> tuple[int, set[str], list[str]]:
    """What a run could leave: open files of this process, shared memory, processes but for the server of ranks."""
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    ranks = [command for command in commands if "forkserver" not in command and "resource_tracker" not in command]
    return psutil.Process().num_fds(), shared, ranks


# Reading a log.


def test_a_log_is_read_again_also_when_its_last_line_is_cut_off(run: Run, tmp_path: Path) -> None:
    run("--steps", "3")
    with open("log.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    assert [line["step"] for line in metrics.read("log.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize("text", ["", "no\nlog\n", "[1]\n[2]\n", '{"a": 1}\n{"b": 2}\n'])
def test_what_is_no_log_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    for path in (tmp_path / "x", tmp_path / "missing"):
        with pytest.raises(ValueError, match="--log has written") as told:
            metrics.read(path)
        assert "\n" not in str(told.value)


def test_a_loss_has_jumped_when_it_is_far_above_those_before_or_no_number() -> None:
    assert report.has_jumped([5, 5, 5, 5, 9], 1.5) and not report.has_jumped([5, 5, 5, 5, 7], 1.5)
    assert not report.has_jumped([5, 5, 9], 1.5)  # too few to know
    assert report.has_jumped([5, float("nan")], 1.5)
    assert not report.has_jumped([9, 9, 9, 9, 9, 5, 5, 5, 5, 5, 5, 5, 5, 6], 1.5)


# What cannot be.


def test_faults_are_read_as_they_are_written() -> None:
    assert inject.parse("nan@5:rank3") == Fault("nan", 5, 3)
    assert inject.parse("spike@8") == Fault("spike", 8)
    assert inject.parse("corrupt-checkpoint") == Fault("corrupt-checkpoint")


REFUSED = [
    ("nan@5", "add :rank0"),
    ("spike@5:rank1", "leave out :rank1"),
    ("melt@5:rank1", "write nan@5:rank3"),
    ("nan@-1:rank0", "write nan@5:rank3"),
    ("nan@5:rank9", "choose a rank from 0 to 1"),
    ("nan@99:rank0", "choose a step below 6"),
    ("corrupt-checkpoint", "add --save FOLDER and --save-every N"),
    ("", "write nan@5:rank3"),
]


@pytest.mark.parametrize(("fault", "said"), REFUSED)
def test_a_fault_that_cannot_come_is_refused_in_one_line(run: Run, fault: str, said: str) -> None:
    code, _, _, printed = run("--dp", "2", "--steps", "6", "--inject", fault)
    assert code == 2 and said in printed and len(printed.strip().splitlines()) == 1


@pytest.mark.parametrize("options", [("--restarts", "1"), ("--rollback", "1.5"), ("--save-aside",)])
def test_what_needs_checkpoints_says_so(run: Run, options: tuple[str, ...]) -> None:
    code, _, _, printed = run(*options)
    assert code == 2 and "add --save FOLDER" in printed and len(printed.strip().splitlines()) == 1


# What is not lost.


def test_an_output_that_would_replace_an_input_is_refused_and_the_input_stays(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("word " * 3000)
    run("--steps", "2", "--save", "kept")
    for options in (
        ("--data", "mine.txt", "--trace", "mine.txt"),
        ("--data", "mine.txt", "--picture", "./mine.txt"),
        ("--init", "mine.txt", "--trace", "mine.txt"),
        ("--resume", "kept", "--trace", "kept/step-00000002/__0_0.distcp"),
    ):
        code, _, _, printed = run(*options)
        assert code == 2 and len(printed.strip().splitlines()) == 1, printed
    assert (tmp_path / "mine.txt").read_text() == "word " * 3000
    assert run("--steps", "3", "--resume", "kept")[0] == 0


def test_a_refused_run_leaves_an_old_log_alone_and_a_resumed_one_adds_to_it(run: Run, tmp_path: Path) -> None:
    _, _, lines, _ = run("--steps", "2", "--save", "kept")
    (tmp_path / "old.jsonl").write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(SystemExit):
        cli.main(["train", *SMALL, "--data", "missing", "--log", "old.jsonl", "--tensorboard", "board"])
    assert (tmp_path / "old.jsonl").read_text() == json.dumps(lines[0]) + "\n" and not (tmp_path / "board").exists()
    with pytest.raises(SystemExit) as end:
        cli.main(["train", *SMALL, "--data", "text", "--resume", "kept", "--steps", "4", "--log", "old.jsonl"])
    assert not end.value.code
    assert [step["step"] for step in metrics.read(tmp_path / "old.jsonl")] == [0, 2, 3]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_log_that_can_no_longer_be_written_does_not_end_the_run(run: Run) -> None:
    code, made, _, printed = run("--steps", "3", "--log", "/dev/full")
    assert code == 0 and len(made["losses"]) == 3
    assert printed.count("cannot write '/dev/full' (No space left on device): training goes on without it") == 1


def test_a_restart_before_the_first_save_goes_back_to_what_was_resumed(run: Run) -> None:
    run("--dp", "2", "--steps", "3", "--save", "first")
    _, whole, _, _ = run("--dp", "2", "--steps", "7", "--resume", "first")
    more = ("--save", "second", "--restarts", "1", "--inject", "kill@5:rank1")
    code, made, lines, _ = run("--dp", "2", "--steps", "7", "--resume", "first", *more)
    assert code == 0 and [line["step"] for line in lines if line.get("event") == "restart"] == [3]
    assert made["losses"] == whole["losses"]


def test_a_checkpoint_from_before_the_first_update_is_as_good_as_any(run: Run) -> None:
    skipped = ("--inject", "nan@0:rank0", "--inject", "nan@1:rank0")
    _, whole, _, _ = run("--dp", "2", "--steps", "5", *skipped)
    run("--dp", "2", "--steps", "2", "--save", "kept", *skipped)
    code, made, _, _ = run("--dp", "2", "--steps", "5", "--resume", "kept")
    assert code == 0 and made["losses"] == whole["losses"][2:]


def test_folders_that_are_no_checkpoints_stay_and_do_not_count(run: Run, tmp_path: Path) -> None:
    run("--steps", "2", "--save", "kept")
    for name in ("step-best", "step-00000009-mine"):
        shutil.copytree(tmp_path / "kept/step-00000002", tmp_path / "kept" / name)
    code, *_ = run("--steps", "6", "--resume", "kept", "--save", "kept", "--save-every", "1", "--keep", "2")
    left = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert code == 0 and left == ["step-00000005", "step-00000006", "step-00000009-mine", "step-best"]


def test_a_run_does_not_go_on_with_other_text(run: Run, tmp_path: Path) -> None:
    run("--steps", "2", "--save", "kept")
    (tmp_path / "other").mkdir()
    for number in range(6):
        words = " ".join(f"thing{(5 * number + i) % 89} runs{i % 11}" for i in range(400))
        (tmp_path / "other" / f"{number}.txt").write_text(words)
    code, _, _, printed = run("--steps", "4", "--resume", "kept", "--data", "other")
    assert code == 2 and "was trained on other text" in printed and "go on with --data" in printed


def test_the_loss_scale_goes_on_where_it_was_also_from_one(run: Run) -> None:
    half = ("--dp", "2", "--precision", "fp16", "--loss-scale", "1", "--scale-window", "3")
    _, whole, _, _ = run(*half, "--steps", "7")
    run(*half, "--steps", "2", "--save", "kept")
    _, made, _, _ = run(*half, "--steps", "7", "--resume", "kept")
    assert made["loss_scales"] == whole["loss_scales"][2:] and made["losses"] == whole["losses"][2:]


IGNORED = [
    (("--loss-scale", "100"), "a loss scale is for fp16"),
    (("--precision", "fp16", "--loss-scale", "1e300"), "choose from 1 to"),
    (("--precision", "fp16", "--loss-scale", "1e-40"), "choose from 1 to"),
    (("--init", ""), "--init '' names nothing"),
    (("--tensorboard", ""), "--tensorboard '' names nothing"),
    (("--save", "x" * 300), "File name too long"),
]


@pytest.mark.parametrize(("options", "said"), IGNORED, ids=lambda value: str(value)[:40])
def test_what_would_be_ignored_or_go_wrong_is_refused(run: Run, options: tuple[str, ...], said: str) -> None:
    code, _, _, printed = run(*options)
    assert code == 2 and said in printed and len(printed.strip().splitlines()) == 1


# Drawn.


def steps_of(*losses: float | None, skipped: int = -1) -> list[dict[str, Any]]:
    return [
        {"step": n, "loss": loss, "grad_norm": None if n == skipped else 1.0 + n, "skipped": n == skipped,
         "step_seconds": {"min": 0.1, "median": 0.1, "max": 1.0 if n == 2 else 0.1}, "busiest_rank": 3}
        for n, loss in enumerate(losses)
    ]  # fmt: skip


def test_a_run_is_drawn_and_said_in_words() -> None:
    drawing = show.run(steps_of(5.0, 4.0, 4.5, 3.0, skipped=1))
    assert drawing.title == "The loss goes from 5 to 3 in 4 steps; 1 step skipped"
    assert "Skipped: 1." in drawing.description
    assert "Slowest: step 2, 1 s, in which rank 3 was busy longest" in drawing.description
    root = ElementTree.fromstring(drawing.svg)
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"loss", "gradient norm", "time of a step in s", "5", "3"} <= set(texts)


def test_going_back_and_beginning_again_are_marked(tmp_path: Path) -> None:
    lines = steps_of(5.0, 9.0, 5.0, 4.0)
    lines[2:2] = [{"event": "rollback", "step": 1, "to": 1, "loss": 9.0}]
    lines.insert(4, {"event": "restart", "step": 3})
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawing = show.run(tmp_path / "log.jsonl")
    assert drawing.title.endswith("1 step rolled back; 1 step begun again")
    assert "Rolled back: 1. Begun again: 3." in drawing.description
    texts = [text.text or "" for text in ElementTree.fromstring(drawing.svg).iter("{http://www.w3.org/2000/svg}text")]
    assert any("back to the weights" in text for text in texts) and not any("not finite" in text for text in texts)


def test_two_runs_lie_over_each_other_and_the_second_is_dashed(tmp_path: Path) -> None:
    for name, losses in (("one", (5.0, 4.0)), ("two", (5.0, None, 3.0))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps_of(*losses)))
    drawing = show.run(tmp_path / "one.jsonl", str(tmp_path / "two.jsonl"))
    assert drawing.title == "Loss of one 4 after 2 steps, of two 3 after 3 steps"
    paths = [path for path in ElementTree.fromstring(drawing.svg).iter("{http://www.w3.org/2000/svg}path")]
    dashed = [path for path in paths if path.get("stroke-dasharray")]
    assert len(dashed) == 3 and "M" in (dashed[0].get("d") or "")[1:]  # a gap where the loss is no number


def test_what_is_no_run_is_refused() -> None:
    for nothing in ([], [1, 2], [{"loss": 3}]):
        with pytest.raises(ValueError, match="this is no log"):
            show.run(nothing)
