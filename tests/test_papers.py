"""Figures that 18 papers have printed, each computed again: by the ledger, from the inputs that the paper gives.

`figures/papers.json` has a row for each: where it stands, inputs, tolerance, and the assumption under which it holds.
Where it says what comes out under a wrong assumption, that must lie outside of the tolerance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minipar import catalogue, ledger
from minipar.facts import Timeline
from minipar.order import Schedule
from minipar.schedule import interleaved, one_f_one_b, zb_h1, zb_h2
from minipar.simulate import simulate

Row = dict[str, Any]
ROWS: list[Row] = json.loads((Path(__file__).parent / "figures" / "papers.json").read_text())["rows"]
BY_ID = {row["id"]: row for row in ROWS}
A100 = catalogue.gpu("a100").peak_flops
BILLION, TOKENS = 1e9, 300e9


def inputs(row: Row) -> Any:
    return row["inputs"]


# Each kind of row, by the beginning of its id, and how the ledger answers it.


def zero_state(row: Row) -> float:
    i = inputs(row)
    return ledger.model_state_bytes(i["params"], dp=i["Nd"], zero=i["stage"]).total / BILLION


def zero_largest_model(row: Row) -> float:
    i = inputs(row)
    one = ledger.model_state_bytes(1.0, dp=i["Nd"], tp=i["MP"], zero=i["stage"]).total
    return i["device_GB"] / one


def megatron_parameters(row: Row) -> float:
    i = {"heads": 128, "vocab": 51200, "seq": 2048} | inputs(row)
    whole = ledger.parameters(
        layers=i["layers"], hidden=i["hidden"], heads=i["heads"], vocab=i["vocab"], sequence=i["seq"]
    )
    return whole / BILLION


def share_of_peak(row: Row) -> float:
    i = inputs(row)
    achieved = i.get("TFLOPs_per_GPU", 0) * 1e12 or i["X"] * 1e12
    return 100 * ledger.mfu(flops=achieved, seconds=1, gpus=1, peak_flops=i["peak"])


def aggregate(row: Row) -> float:
    return float(inputs(row)["GPUs"] * inputs(row)["TFLOPs_per_GPU"] / 1e3)


def gpt3_days(row: Row) -> float:
    i = inputs(row)
    return ledger.days(i["P"], i["T"], i["n"], i["X"] / 1e12)


def flops_of_a_step(row: Row, recompute: str) -> float:
    i = inputs(row)
    sizes = {"layers": i["layers"], "hidden": i["hidden"], "vocab": i["vocab"], "sequence": i["seq"]}
    return ledger.step_flops(**sizes, global_batch=i["batch"], recompute=recompute)


def megatron_days(row: Row) -> float:
    """Equation 3's FLOPs of a step, at what each GPU achieves."""
    i, flops = inputs(row), flops_of_a_step(row, "full")
    seconds = ledger.run_seconds(flops, i["GPUs"] * i["TFLOPs"] * 1e12)
    rate = ledger.tokens_per_second(global_batch=i["batch"], sequence=i["seq"], step_seconds=seconds)
    return ledger.token_days(TOKENS, rate)


def korthikanti(recompute: str) -> Callable[[Row], float]:
    def use(row: Row) -> float:
        i, flops = inputs(row), flops_of_a_step(row, recompute)
        return 100 * ledger.mfu(flops=flops, seconds=i["iter_present"], gpus=i["GPUs"], peak_flops=A100)

    return use


def kept_share(**how: Any) -> Callable[[Row], float]:
    """Activations of a block with something saved, in percent of tensor parallel's."""

    def share(row: Row) -> float:
        i = inputs(row)
        sizes = {"hidden": i["hidden"], "heads": i["heads"], "sequence": i["seq"], "micro_batch": 1, "tp": i["TP"]}
        return 100 * ledger.layer_activation_bytes(**sizes, **how) / ledger.layer_activation_bytes(**sizes)

    return share


def block(row: Row, recompute: str = "none") -> float:
    i = inputs(row)
    sizes = {"hidden": i["h"], "heads": i["a"], "sequence": i["s"], "micro_batch": 1}
    return ledger.layer_activation_bytes(**sizes, recompute=recompute)


def scores(row: Row) -> float:
    i = inputs(row)
    return (block(row) - block(row, "selective")) / (i["s"] * i["h"])


def saved_by_selective(row: Row) -> float:
    return 100 * (1 - block(row, "selective") / block(row))


def selective_flops(row: Row) -> float:
    i = inputs(row)
    one = {"layers": 1, "hidden": i["h"], "vocab": 1e-9, "sequence": i["s"], "global_batch": 1}
    return 100 * (ledger.step_flops(**one, recompute="selective") / ledger.step_flops(**one) - 1)


def zero_bubble(make: Callable[..., Schedule]) -> Callable[[Row], float]:
    """What a step costs beyond the work of its micro-batches, on the stage that takes longest, from first to last."""

    def rate(row: Row) -> float:
        i = inputs(row)
        v = i.get("v", 1)
        order = make(i["p"], i["m"], v) if v > 1 else make(i["p"], i["m"])
        timeline: Timeline = simulate(order, i["TF"] / v, i["TB"] / v, i["TW"] / v, i["Tcomm"])
        lanes = [[span for span in timeline.spans if span.rank == rank] for rank in range(i["p"])]
        cost = max(max(span.end for span in lane) - min(span.start for span in lane) for lane in lanes)
        work = i["m"] * (i["TF"] + i["TB"] + i["TW"])
        return float((cost - work) / cost)

    return rate


PALM = {"layers": 118, "width": 48 * 256, "sequence": 2048}
PALM_RATE, PALM_CHIPS, TPU = 238.3e3, 6144, 275e12


def palm(**how: Any) -> Callable[[Row], float]:
    def use(row: Row) -> float:
        flops = PALM_RATE * ledger.token_flops(540e9, **how)
        return 100 * ledger.mfu(flops=flops, seconds=1, gpus=PALM_CHIPS, peak_flops=TPU)

    return use


def palm_token(**how: Any) -> Callable[[Row], float]:
    def flops(row: Row) -> float:
        i = inputs(row)
        return ledger.token_flops(i["N"], layers=i["L"], width=i["HQ"], sequence=i["T"], **how) / 1e12

    return flops


def palm_run(row: Row) -> float:
    """PaLM's table 22: 8B and 540B by name."""
    shape = {"8B": (8.63e9, 32, 4096), "540B": (540.35e9, 118, 12288)}[row["id"].rpartition(".")[2]]
    parameters, layers, width = shape
    return 780e9 * ledger.token_flops(parameters, layers=layers, width=width, sequence=2048)


def mt_nlg_mfu(row: Row) -> float:
    flops = inputs(row)["tokens_s"] * ledger.token_flops(530e9)
    return 100 * ledger.mfu(flops=flops, seconds=1, gpus=inputs(row)["n"], peak_flops=A100)


def six_n_d(unit: float = 1.0) -> Callable[[Row], float]:
    return lambda row: ledger.training_flops(inputs(row)["N"], inputs(row)["D"]) / unit


def gpt3_flops(row: Row) -> float:
    i = inputs(row)
    used = i["flops_per_param_token"] / 6  # half of an encoder-decoder's parameters see each token
    return ledger.training_flops(used * i["params_M"] * 1e6, i["tokens_B"] * BILLION)


def mt_nlg_achieved(row: Row) -> float:
    i = inputs(row)
    flops = ledger.step_flops(
        layers=i["l"], hidden=i["h"], vocab=i["V"], sequence=i["s"], global_batch=i["B"], recompute="full"
    )
    return flops / i["iter"] / (8 * i["nodes"]) / 1e12


def megascale_rate(row: Row) -> float:
    i = inputs(row)
    return ledger.tokens_per_second(global_batch=i["B"], sequence=i["seq"], step_seconds=i["iter"])


def megascale_mfu(row: Row) -> float:
    i = inputs(row)
    flops = ledger.step_flops(layers=i["l"], hidden=i["h"], vocab=i["vocab"], sequence=i["seq"], global_batch=i["B"])
    return 100 * ledger.mfu(flops=flops, seconds=i["iter"], gpus=i["GPUs"], peak_flops=i["peak"])


def torchtitan_mfu(row: Row) -> float:
    i = inputs(row)
    flops = i["wps"] * ledger.token_flops(i["N"], layers=i["L"], width=i["d"], sequence=i["seq"])
    return 100 * ledger.mfu(flops=flops, seconds=1, gpus=1, peak_flops=i["peak"])


def torchtitan_memory(row: Row) -> float:
    few, many = (ledger.model_state_bytes(inputs(row)["N"], dp=dp, zero=3).total for dp in inputs(row)["dp"])
    return (few - many) / 2**30


def hybrid_shard(row: Row) -> float:
    i = inputs(row)
    return ledger.ring_bytes("all_reduce", i["M"] / i["G"], i["W"] // i["G"])


def product(*names: str) -> Callable[[Row], float]:
    def multiplied(row: Row) -> float:
        answer = 1
        for name in names:
            answer *= inputs(row)[name]
        return answer

    return multiplied


ANSWERS: list[tuple[str, Callable[[Row], float]]] = [
    (r"zero\.(fig1|t1)\.", zero_state),
    (r"zero\.t2\.", zero_largest_model),
    (r"zero\.gpt2\.state", lambda row: ledger.model_state_bytes(inputs(row)["params"]).total / BILLION),
    (r"meg\.(t1\.)?params\.", megatron_parameters),
    (r"meg\.t1\.pct\.", share_of_peak),
    (r"meg\.t1\.agg\.", aggregate),
    (r"meg\.time\.gpt3", gpt3_days),
    (r"meg\.t2\.", megatron_days),
    (r"kor\.t5\.mfu", korthikanti("none")),
    (r"kor\.t5\.hfu", korthikanti("selective")),
    (r"kor\.fig7\.combined", kept_share(sequence_parallel=True, recompute="selective")),
    (r"kor\.fig7\.full", kept_share(recompute="full")),
    (r"kor\.5as_h", scores),
    (r"kor\.save", saved_by_selective),
    (r"kor\.flops_overhead", selective_flops),
    (r"zb\.t5\.1F1B\.", zero_bubble(one_f_one_b)),
    (r"zb\.t5\.ZB-(H1|1p)", zero_bubble(zb_h1)),
    (r"zb\.t5\.ZB-H2", zero_bubble(zb_h2)),
    (r"zb\.t5\.1F1B-I", zero_bubble(interleaved)),
    (r"ds3\.days\.perT", lambda row: inputs(row)["h"] / inputs(row)["n"] / 24),
    (r"palm\.mfu\.noattn", palm()),
    (r"palm\.mfu\.attn", palm(**PALM)),
    (r"palm\.hfu", palm(**PALM, recomputed=0.75, recomputed_attention=1.0)),
    (r"palm\.t22\.flops_tok", palm_token()),
    (r"palm\.t22\.remat", palm_token(recomputed_attention=1.0)),
    (r"palm\.t22\.train", palm_run),
    (r"palm\.t22\.pfd", lambda row: ledger.petaflop_days(palm_run(BY_ID["palm.t22.train.540B"]))),
    (r"palm\.t21\.", six_n_d(1e21)),
    (r"palm\.mtnlg\.noattn", mt_nlg_mfu),
    (r"palm\.hosts", lambda row: ledger.model_state_bytes(540e9).gradients / inputs(row)["hosts_per_pod"] / BILLION),
    (r"gpt3\.d1\.flops", gpt3_flops),
    (r"gpt3\.d1\.pfd", lambda row: ledger.petaflop_days(inputs(row)["flops"])),
    (r"chin\.t3\.", six_n_d()),
    (r"ll1\.t15\.co2", lambda row: ledger.carbon_tonnes(inputs(row)["mwh"], inputs(row)["ci"])),
    (r"ll1\.t15\.mwh", lambda row: ledger.energy_mwh(inputs(row)["hours"], inputs(row)["W"], inputs(row)["PUE"])),
    (r"ll1\.opt\.days", lambda row: inputs(row)["hours"] / inputs(row)["n"] / 24),
    (r"ll1\.65B\.days", lambda row: ledger.token_days(inputs(row)["T"], inputs(row)["tps"] * inputs(row)["n"])),
    (r"ll1\.65B\.hours", lambda row: 24 * ledger.token_days(inputs(row)["T"], inputs(row)["tps"])),
    (r"ll3\.scalinglaw$", lambda row: ledger.best_tokens(inputs(row)["C"])),
    (r"(ll3\.scalinglaw\.6ND|seed\.flops)", six_n_d()),
    (r"ll3\.t4\.gpus", product("TP", "CP", "PP", "DP")),
    (r"ll3\.t4\.mfu", share_of_peak),
    (r"bloom\.cfg", product("TP", "PP", "DP")),
    (r"bloom\.params", lambda row: catalogue.model("bloom-176b").parameters / BILLION),
    (r"bloom\.emb", product("V", "h")),
    (r"bloom\.bf16", lambda row: ledger.model_state_bytes(inputs(row)["N"]).weights / 2**30),
    (
        r"bloom\.days",
        lambda row: ledger.token_days(
            inputs(row)["T"], ledger.tokens_per_second(global_batch=2048, sequence=2048, step_seconds=inputs(row)["t"])
        ),
    ),
    (r"mtnlg\.280", mt_nlg_achieved),
    (r"ms\.mfu", megascale_mfu),
    (r"ms\.tps", lambda row: megascale_rate(row) / 1e3),
    (r"ms\.days", lambda row: ledger.token_days(TOKENS, megascale_rate(row))),
    (r"ms\.agg", lambda row: inputs(row)["MFU"] / 100 * inputs(row)["n"] * A100 / 1e15),
    (r"fsdp\.vol\.hybrid", hybrid_shard),
    (r"tt\.mfu", torchtitan_mfu),
    (r"tt\.memdelta", torchtitan_memory),
    (r"seed\.time", lambda row: ledger.run_seconds(inputs(row)["F"], inputs(row)["P"])),
]

# Measured by their authors, and then put in proportion or counted: nothing that an account could say beforehand.
NO_ACCOUNT = {
    r"kor\.t5\.tput": "two measured times",
    r"kor\.t4\.": "two measured times",
    r"ll3\.t5\.": "counted interruptions",
    r"ll3\.hours\.total": "a sum of measured hours",
    r"bloom\.remaining": "a day in the middle of a run",
    r"hw\.h800\.ratio": "two rates that were given",
}


def answer_for(row: Row) -> Callable[[Row], float] | None:
    found = [answer for pattern, answer in ANSWERS if re.match(pattern, row["id"])]
    assert len(found) <= 1, row["id"]
    return found[0] if found else None


COMPUTED = [row for row in ROWS if not row["measured_only"] and answer_for(row)]


def holds(value: float, row: Row) -> bool:
    tolerance, printed = row["tolerance"], row["value"]
    if "max" in tolerance:
        return bool(value <= tolerance["max"])
    room = tolerance.get("abs", 0.0) + abs(printed) * tolerance.get("rel", 0.0)
    return bool(abs(value - printed) <= room * (1 + 1e-9) + 1e-12)


@pytest.mark.parametrize("row", COMPUTED, ids=[row["id"] for row in COMPUTED])
def test_a_figure_that_a_paper_has_printed(row: Row) -> None:
    answer = answer_for(row)
    assert answer is not None
    value = answer(row)
    assert holds(value, row), f"{value} is not the printed {row['value']} {row['unit']} ({row['formula']})"


def test_every_figure_is_computed_unless_it_was_measured() -> None:
    assert len(ROWS) == 292
    left = [row["id"] for row in ROWS if not row["measured_only"] and not answer_for(row)]
    assert [name for name in left if not any(re.match(pattern, name) for pattern in NO_ACCOUNT)] == []
    assert all(any(re.match(pattern, name) for name in left) for pattern in NO_ACCOUNT)
    assert len(COMPUTED) > 220


TOO_COARSE = r"meg\.(t1\.)?params.*: (vocab 50257|12lh\^2)|tt\.memdelta.*: (18 B/param|decimal GB)"


def test_what_comes_out_under_a_wrong_assumption_is_not_the_printed_figure() -> None:
    """Binary gigabytes, a 6 for an 8, no recomputation: what a reader may have in mind. Where a paper prints too few
    digits to tell, `TOO_COARSE` says so."""
    near = [
        f"{row['id']}: {wrong}"
        for row in COMPUTED
        for wrong, value in row.get("value_under_a_wrong_assumption", {}).items()
        if isinstance(value, int | float) and holds(value, row)
    ]
    assert [name for name in near if not re.fullmatch(TOO_COARSE, name)] == []


def test_every_way_to_answer_is_used() -> None:
    assert [pattern for pattern, _ in ANSWERS if not any(re.match(pattern, row["id"]) for row in COMPUTED)] == []


HARDWARE = {
    "hw.a100.bf16": catalogue.gpu("a100").peak_flops / 1e12,
    "hw.a100.nvlink": 2 * catalogue.link("nvlink3").bandwidth / 1e9,
    "hw.h100.bf16": catalogue.gpu("h100").peak_flops / 1e12,
    "hw.h100.mem": catalogue.gpu("h100").memory_bytes / 1e9,
    "hw.h100.nvlink": 2 * catalogue.link("nvlink4").bandwidth / 1e9,
    "hw.h200.mem": catalogue.gpu("h200").memory_bytes / 1e9,
    "hw.h200.bw": catalogue.gpu("h200").memory_bandwidth / 1e12,
    "hw.h200.nvlink": 2 * catalogue.link("nvlink4").bandwidth / 1e9,
    "hw.b200.bf16": catalogue.gpu("b200").peak_flops / 1e12,
    "hw.b200.mem": catalogue.gpu("b200").memory_bytes / 1e9,
    "hw.b200.bw": catalogue.gpu("b200").memory_bandwidth / 1e12,
    "hw.b200.nvlink": 2 * catalogue.link("nvlink5").bandwidth / 1e9,
    "hw.ib.ndr": 8 * catalogue.link("ndr").bandwidth / 1e9,
}


@pytest.mark.parametrize("name", HARDWARE)
def test_the_catalogue_has_the_figures_of_the_datasheets(name: str) -> None:
    assert holds(HARDWARE[name], BY_ID[name])
    assert {row["id"] for row in ROWS if row["id"].startswith("hw.")} - {"hw.h800.ratio"} == set(HARDWARE)
