"""`minipar ledger` and `minipar plan`, as people and programs call them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minipar.catalogue import MODELS

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


QUESTION = ("ledger", "--params", "7e9", "--tokens", "1e12", "--cluster-flops", "1e18")


def test_7_billion_on_a_trillion_tokens_have_the_textbooks_answer_and_the_honest_longer_one(run: Run) -> None:
    code, out, err = run(*QUESTION)
    assert code == 0 and not err
    assert "4.2e+22 FLOPs" in out and "42,000 s" in out
    answer = json.loads(run(*QUESTION, "--json")[1])["compute"]
    assert answer["flops"] == 4.2e22 and answer["ideal_seconds"] == pytest.approx(42_000)
    assert answer["ideal_seconds"] / 0.4 < answer["waiting_seconds"] < answer["honest_seconds"] < 4 * 42_000


def test_a_table_fits_80_columns_and_says_what_to_watch(run: Run) -> None:
    for arguments in (
        QUESTION,
        ("ledger", "--model", "llama3-405b", "--tokens", "15T", "--gpu", "h100", "--gpus", "16384", "--tp", "8", "--pp",
         "16", "--zero", "2", "--recompute", "full", "--sequence", "8192", "--unique", "3T"),
        ("plan", "--params", "70B", "--gpus", "64", "--why", "tp=16", "--why", "dp=64,zero=0", "--tokens", "1T"),
        ("plan", "--model", "megatron-1t", "--gpus", "3072", "--gpu", "a100", "--sequence", "2048", "--global-batch",
         "3072", "--why", "pp=64"),
    ):  # fmt: skip
        code, out, err = run(*arguments)
        assert code == 0 and not err
        assert max(map(len, map(str.rstrip, out.splitlines()))) <= 80, arguments
    assert "watch MFU" in run(*QUESTION)[1] and "loss spikes" in run(*QUESTION)[1]


def test_deductions_multiply(run: Run) -> None:
    asked = ("--mfu", "50%", "--waiting", "0.1", "--failures", "1h", "--save", "30s", "--restart", "2min")
    facts = json.loads(run(*QUESTION, *asked, "--json")[1])
    kept = facts["stability"]["goodput"]
    assert facts["stability"]["checkpoint_interval"] == pytest.approx((2 * 30 * 3600) ** 0.5)
    assert facts["compute"]["honest_seconds"] == pytest.approx(42_000 / 0.5 / 0.9 / kept)
    assert 0.8 < kept < 0.9


def test_accounts_of_a_layout(run: Run) -> None:
    facts = json.loads(
        run("ledger", "--model", "llama3-70b", "--gpu", "h100", "--dp", "4", "--tp", "8", "--pp", "2", "--zero", "1",
            "--sequence", "4096", "--global-batch", "64", "--json")[1]
    )  # fmt: skip
    N = 70_553_706_496
    assert facts["memory"]["state_bytes"] == 16 * N
    assert facts["memory"]["zero1_bytes"] == pytest.approx(N / 16 * (4 + 12 / 4))
    activation = 4096 * 8192 * 2
    assert facts["communication"]["tp_payload_bytes"] == 16 * 40 * 4 * activation  # micro-batches, layers, all_reduces
    assert facts["communication"]["tp_bytes"] == pytest.approx(16 * 40 * 4 * activation * 2 * 7 / 8)
    assert facts["communication"]["pp_bytes"] == 2 * 16 * activation / 8
    assert facts["data"] == {"best_tokens": 20 * N}


def test_repetition_is_worth_less_than_fresh_text(run: Run) -> None:
    facts = json.loads(run("ledger", "--params", "7B", "--tokens", "1T", "--unique", "250B", "--json")[1])
    assert facts["data"]["epochs"] == 4 and 0.9e12 < facts["data"]["tokens_worth"] < 0.95e12


@pytest.mark.parametrize(("zero", "halves"), [(0, 2), (1, 2), (2, 16 + 1), (3, 16 + 32)])
def test_what_replicas_send_depends_on_the_stage_of_zero(run: Run, zero: int, halves: int) -> None:
    """In halves of an all_reduce: gradients for each of 16 micro-batches from stage 2, weights twice for each in 3."""
    facts = json.loads(
        run("ledger", "--model", "gpt2-xl", "--dp", "4", "--zero", str(zero), "--sequence", "1024", "--global-batch",
            "64", "--json")[1]
    )  # fmt: skip
    weights = 2 * MODELS["gpt2-xl"].parameters
    assert facts["communication"]["dp_bytes"] == pytest.approx(halves * 3 / 4 * weights)


def test_the_memory_of_what_was_asked_adds_up(run: Run) -> None:
    memory = json.loads(run("ledger", "--params", "7B", "--dp", "1", "--json")[1])["memory"]
    assert memory["layout_bytes"] == pytest.approx(16 * 7e9 + memory["activations_bytes"] + memory["buffers_bytes"])


def test_what_with_has_left_out_is_not_called_slower(run: Run) -> None:
    _, out, _ = run("plan", "--params", "70B", "--gpus", "64", "--with", "pp=4", "--why", "pp=1")
    assert "pp=1 would be faster by" in " ".join(out.split()) and "--with leaves it out" in " ".join(out.split())


# The plan.


def test_a_plan_names_its_layout_its_reasons_and_why_another_loses(run: Run) -> None:
    code, out, err = run("plan", "--params", "70e9", "--gpus", "64", "--gpu", "h100", "--gpus-per-node", "8",
                         "--sequence", "4096", "--global-batch", "1024", "--why", "tp=16")  # fmt: skip
    assert code == 0 and not err
    words = " ".join(out.split())
    for said in ("answers 'does not fit'", "answers 'too slow'", "inside a node (nvlink4", "across nodes (ndr",
                 "ZeRO", "Why not tp=16?", "spans 2 nodes", "Predicted, not measured"):  # fmt: skip
        assert said in words
    best = re.search(r"^dp=(\d+) tp=(\d+) pp=(\d+) zero=(\d)", out, re.MULTILINE)
    assert best and int(best[1]) * int(best[2]) * int(best[3]) == 64


def test_a_plan_for_programs(run: Run) -> None:
    wanted = ("--with", "tp=2,pp=2", "--why", "zero=0")
    answer = json.loads(run("plan", "--model", "llama3-8b", "--gpus", "16", *wanted, "--json")[1])
    best: dict[str, Any] = answer["best"]
    assert (best["tp"], best["pp"], best["dp"]) == (2, 2, 4)
    assert best["step_seconds"] == pytest.approx(sum(best["seconds"].values()))
    assert best["bytes"] == pytest.approx(sum(best["memory"].values())) and best["bytes"] <= 80e9
    assert answer["ranked"][0] == best and list(answer["why"]) == ["zero=0"]


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_plan_is_drawn(run: Run, tmp_path: Path, ending: str) -> None:
    code, out, _ = run("plan", "--params", "7B", "--gpus", "8", "--picture", f"plan.{ending}")
    assert code == 0 and f"written: plan.{ending}" in out
    begin = (tmp_path / f"plan.{ending}").read_bytes()[:60]
    assert begin.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in begin


# What cannot be: one line that says what to change, exit code 2.

PLAN, LEDGER = "plan --gpus 64", "ledger --params 7B"
REFUSED = [
    ("plan", "which model?"),
    ("ledger", "which model?"),
    (f"{PLAN} --params=-7B", "give a finite number above 0"),
    (f"{PLAN} --params 0", "give a finite number above 0"),
    (f"{PLAN} --params nan", "give a finite number above 0"),
    (f"{PLAN} --params 1e40", "out of range"),
    (f"{PLAN} --params 12", "choose from 1e6 to 1e15"),
    (f"{PLAN} --params seven", "write a number such as 7B"),
    (f"{PLAN} --params 7B --model llama3-8b", "one description"),
    (f"{PLAN} --params 7B --layers 3", "one description"),
    (f"{PLAN} --model llama3-7b", "did you mean llama3-"),
    (f"{PLAN} --model nothing", "choose from gpt2"),
    (f"{PLAN} --hidden 4096", "which model?"),
    (f"{PLAN} --layers 4 --hidden 100 --heads 7", "choose a hidden size"),
    (f"{PLAN} --params 7B --gpu h1000", "did you mean h100?"),
    (f"{PLAN} --params 7B --gpu 3", "choose from v100"),
    ("plan --params 7B --gpus 0", "give a finite number above 0"),
    ("plan --params 7B --gpus 2.5", "not a whole number"),
    ("plan --params 7B --gpus 1e9", "choose at most 1,000,000"),
    ("plan --params 7B --gpus 60", "choose 56 or 64 GPUs"),
    (f"{PLAN} --params 7B --outside fast", "choose from nvlink2"),
    (f"{PLAN} --params 7B --outside 0Gb/s", "no name and no rate"),
    (f"{PLAN} --params 7B --sequence -1", "above 0"),
    (f"{PLAN} --params 7B --global-batch 1.5", "not a whole number"),
    (f"{PLAN} --params 7B --global-batch 7 --with dp=2", "must divide"),
    (f"{PLAN} --params 7B --with tp=7", "does not divide 64 GPUs"),
    (f"{PLAN} --params 7B --with tp", "write tp=16"),
    (f"{PLAN} --params 7B --with speed=9", "choose from chunks"),
    (f"{PLAN} --params 7B --with zero=4", "choose from 0, 1, 2, 3"),
    (f"{PLAN} --params 7B --with tp=-2", "whole number from 1"),
    (f"{PLAN} --params 7B --with schedule=fast", "choose from 1f1b"),
    (f"{PLAN} --params 7B --why ''", "chooses nothing"),
    (f"{PLAN} --params 7B --why pp=64", "more stages than"),
    (f"{PLAN} --params 7B --picture no/where.svg", "no/where.svg"),
    (f"{PLAN} --params 7B --picture plan.gif", "plan.gif"),
    ("plan --params 70B --gpus 1 --gpu rtx4090", "nothing fits"),
    (f"{LEDGER} --mfu 1.4", "no share"),
    (f"{LEDGER} --mfu 0", "no share"),
    (f"{LEDGER} --zero 4", "out of range"),
    (f"{LEDGER} --dp 3 --gpus 8", "choose degrees"),
    (f"{LEDGER} --tp 5", "must divide 32 heads"),
    (f"{LEDGER} --pp 64", "need as many"),
    (f"{LEDGER} --dp 3 --global-batch 10", "choose 12"),
    (f"{LEDGER} --failures 1s --restart 1h", "no run ends"),
    (f"{LEDGER} --cluster-flops fast", "is no speed"),
    (f"{LEDGER} --tokens 0", "above 0"),
    (f"{LEDGER} --save soon", "is no time"),
    (f"{LEDGER} --waiting 100%", "leaves no time for steps"),
    (f"{LEDGER} --cluster-flops 1e18 --gpus 8", "leave out --gpus or --cluster-flops"),
    (f"{PLAN} --params 7B --outside 5", "no name and no rate"),
    (f"{PLAN} --model gpt2 --sequence 4096", "choose --sequence 1024 or less"),
]


@pytest.mark.parametrize(("line", "said"), REFUSED, ids=[line for line, _ in REFUSED])
def test_what_cannot_be_is_refused_in_one_line(run: Run, line: str, said: str) -> None:
    code, out, err = run(*("" if word == "''" else word for word in line.split()))
    assert code == 2 and not out
    assert said in err and err.count("\n") == 1 and "Traceback" not in err
