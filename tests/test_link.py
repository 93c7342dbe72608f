"""A slow link: messages keep their values, take as long as the link says, and are predicted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import which
from statistics import median
from time import perf_counter
from typing import Any

import cloudpickle
import pytest
import torch

import minipar
from minipar import link, links, replay
from minipar.batches import RandomBatches
from minipar.cli import main
from minipar.comm import Group
from minipar.link import Link, Network
from minipar.mesh import plan
from minipar.message import Message
from minipar.model import GPTConfig
from minipar.train import Engine, TrainConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MEGABYTE = 1_000_000
SLOW = Link(bandwidth=20 * MEGABYTE, latency=0.002)


# What is asked for.


@pytest.mark.parametrize(
    ("text", "bandwidth", "latency"),
    [
        ("1gbit", 125e6, link.LATENCY),
        ("200 Mbit/s", 25e6, link.LATENCY),
        ("2.5gbit:10us", 312.5e6, 1e-5),
        ("64kbit:0.2s", 8e3, 0.2),
    ],
)
def test_links_are_read(text: str, bandwidth: float, latency: float) -> None:
    one = link.parse(text)
    assert (one.bandwidth, one.latency) == pytest.approx((bandwidth, latency))
    again = link.parse(str(one))
    assert (again.bandwidth, again.latency) == pytest.approx((bandwidth, latency))


@pytest.mark.parametrize("text", ["", "fast", "0gbit", "1", "-1gbit", "1gbit:", "1gbit:5", "1tbit", "1gbit:-1us"])
def test_what_is_no_link_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="is no speed: give one such as 1gbit"):
        link.parse(text)


def test_neighbouring_ranks_share_a_node() -> None:
    assert [Network(2, 6, SLOW).node(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match="6 ranks cannot be dealt to 4 nodes: choose nodes from 2, 3, 6"):
        Network(4, 6, SLOW)


# Real messages.


def results(group: Any, network: Network | None) -> list[torch.Tensor]:
    """Of every kind of message, small and large, in whole numbers: so that sums don't depend on their order."""
    if network:
        link.put_in(group, network)
    answer = []
    for size in (7, 30_011):
        x = torch.arange(size, dtype=torch.float64) % 13 + group.rank
        answer += [group.all_reduce(x.clone()), group.all_reduce(x.clone(), "max"), group.all_gather(x)]
        answer.append(group.all_reduce(x.clone(), "mean", async_op=True).wait())
        answer.append(group.reduce_scatter(x.repeat(group.size)))
        answer.append(group.all_to_all(x.repeat(group.size)))
        there, back = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        sent = group.send(x, there, async_op=True)
        answer.append(group.recv(torch.empty_like(x), back))
        sent.wait()
    return answer


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 2), (4, 2), (3, 3)])
def test_no_value_depends_on_the_link(ranks: int, nodes: int) -> None:
    slow = minipar.run(results, ranks, Network(nodes, ranks, SLOW))
    for one, other in zip(slow, minipar.run(results, ranks, None), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def durations(group: Any, network: Network | None, sizes: list[int]) -> dict[str, list[float]]:
    """Seconds of each kind of message of so many bytes: the median of three."""
    if network:
        link.put_in(group, network)
    found: dict[str, list[float]] = {}
    for size in sizes:
        x = torch.zeros(size // 4)
        share = x.chunk(group.size)[0].clone()
        for name, call in (
            ("send", lambda x=x: group.send(x, 1) if group.rank == 0 else group.recv(x, 0)),
            ("all_reduce", lambda x=x: group.all_reduce(x)),
            ("reduce_scatter", lambda x=x: group.reduce_scatter(x)),
            ("all_gather", lambda share=share: group.all_gather(share)),
        ):
            seconds = []
            for _ in range(4):
                group.barrier()
                start = perf_counter()
                call()
                seconds.append(perf_counter() - start)
            found.setdefault(name, []).append(median(seconds[1:]))
    return found


def closed(name: str, size: int, one: Link) -> float:
    """Between two ranks: one message of all, or of half, or half each way twice."""
    half = one.latency + size / 2 / one.bandwidth
    return {"send": one.latency + size / one.bandwidth, "all_reduce": 2 * half}.get(name, half)


def test_messages_take_as_long_as_latency_and_bandwidth_say() -> None:
    """No less than that; how much more is the machine's own time."""
    sizes = [400_000, 2 * MEGABYTE]
    by_rank = minipar.run(durations, 2, Network(2, 2, SLOW), sizes)
    for name in by_rank[0]:
        for place, size in enumerate(sizes):
            seconds = max(rank[name][place] for rank in by_rank)
            assert closed(name, size, SLOW) <= seconds + 1e-4, (name, size)
            assert seconds < 2 * closed(name, size, SLOW), (name, size)


def arrivals(group: Any, network: Network) -> tuple[float, float]:
    """Both ranks of node 0 send a megabyte to node 1 at once: when this rank began, and when it had arrived."""
    link.put_in(group, network)
    x = torch.zeros(MEGABYTE // 4)
    group.barrier()
    start = perf_counter()
    group.send(x, group.rank + 2) if group.rank < 2 else group.recv(x, group.rank - 2)
    return start, perf_counter()


def test_the_ranks_of_a_node_share_its_line_and_ranks_of_one_node_do_not_use_it() -> None:
    times = minipar.run(arrivals, 4, Network(2, 4, SLOW))
    begun = min(start for start, _ in times)
    assert max(end for _, end in times[2:]) - begun >= 2 * MEGABYTE / SLOW.bandwidth  # the second waits for the first
    alone = minipar.run(arrivals, 4, Network(1, 4, SLOW))
    assert max(end - start for start, end in alone) < MEGABYTE / SLOW.bandwidth


def trained(mesh: Any, config: TrainConfig, network: Network | None) -> list[tuple[float, float]]:
    engine = Engine(mesh, config)
    if network:
        link.put_in(mesh.world, network)
    batches = RandomBatches(vocab=config.model.vocab, sequence=config.model.sequence, global_batch=config.global_batch)
    rows = config.global_batch // mesh.dp.size
    answer = []
    for step in range(3):
        result = engine.step(batches.rows(step, mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows))
        answer.append((result.loss, result.gradient_norm))
    return answer


MODEL = GPTConfig(layers=4, hidden=32, heads=4, vocab=600, sequence=16)
CONFIG = TrainConfig(model=MODEL, global_batch=8, micro_batches=2, precision="fp64", warmup=0)


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        ({"dp": 2}, {"bucket_bytes": 100_000}),
        ({"dp": 4}, {"zero": 2}),
        ({"dp": 2}, {"zero": 3}),
        ({"tp": 2}, {"sequence_parallel": True}),
        ({"tp": 4}, {}),
        ({"pp": 4}, {"schedule": "zb-h1"}),
        ({"dp": 2, "pp": 2}, {"zero": 1}),
    ],
    ids=str,
)
def test_training_over_a_slow_link_is_the_same_training(degrees: dict[str, int], options: dict[str, Any]) -> None:
    mesh, config = plan(**degrees), replace(CONFIG, **options)
    slow = minipar.run(trained, mesh, config, Network(2, mesh.size, Link(200 * MEGABYTE)))
    for one, other in zip(slow, minipar.run(trained, mesh, config, None), strict=True):
        assert one == [pytest.approx(pair, rel=1e-12) for pair in other]


# The prediction.


def step_of(*events: tuple[str, int, float, float, float], end: float, peer: int | None = None) -> replay.Step:
    """Messages (operation, bytes, launched, waited for from, until) of one rank in the group 'all'."""
    messages = [Message(op, "all", "", size, at, peer, until - since, until) for op, size, at, since, until in events]
    return replay.Step(0.0, end, messages)


def predicted(steps: list[replay.Step], one: Link = SLOW) -> float:
    ranks = list(range(len(steps)))
    return replay.predict(steps, lambda rank, name: ranks, Network(2, len(steps), one))


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
def test_a_message_that_both_wait_for_is_predicted_by_the_closed_formula(op: str) -> None:
    one = step_of((op, 2 * MEGABYTE, 1.0, 1.0, 1.0), end=3.0)
    assert predicted([one, one]) == pytest.approx(3.0 + closed(op, 2 * MEGABYTE, SLOW))


def test_a_message_is_free_as_far_as_a_rank_has_other_work() -> None:
    """0.1 s of link, of which 0.06 s or 0.5 s of work take place meanwhile."""
    size = int(0.098 * SLOW.bandwidth)
    for work, exposed in ((0.06, 0.04), (0.5, 0.0)):
        one = step_of(("all_gather", size, 1.0, 1.0 + work, 1.0 + work), end=2.0)
        assert predicted([one, one]) == pytest.approx(2.0 + exposed)


def test_a_rank_waits_for_one_that_comes_late() -> None:
    early = step_of(("all_gather", 100, 1.0, 1.0, 2.0), end=2.5)
    late = step_of(("all_gather", 100, 2.0, 2.0, 2.0), end=2.5)
    assert predicted([early, late]) == pytest.approx(2.5 + SLOW.latency + 100 / SLOW.bandwidth)


def test_the_line_of_a_node_passes_on_one_message_after_another() -> None:
    """All four gather a megabyte: each node's line carries two ranks' megabyte to two others."""
    one = step_of(("all_gather", MEGABYTE, 1.0, 1.0, 1.0), end=1.0)
    assert predicted([one] * 4) == pytest.approx(1.0 + 4 * MEGABYTE / SLOW.bandwidth + SLOW.latency)


def test_a_pipelines_messages_arrive_in_turn() -> None:
    sends = [step_of(*[("send", MEGABYTE, t, t + 1, t + 1) for t in (0.0, 0.01)], end=1.5, peer=1)]
    receives = [step_of(*[("recv", 0, 0.0, 0.1 * t, 0.1 * t) for t in (1, 2)], end=0.2, peer=0)]
    assert predicted(sends + receives) == pytest.approx(1.5)
    sends = [step_of(*[("send", MEGABYTE, t, 0.02, 0.02) for t in (0.0, 0.01)], end=0.02, peer=1)]
    assert predicted(sends + receives) == pytest.approx(2 * MEGABYTE / SLOW.bandwidth + SLOW.latency + 0.1, abs=0.1)


def test_messages_that_do_not_match_are_told() -> None:
    one, other = step_of(("all_reduce", 8, 0.0, 0.0, 0.0), end=1.0), step_of(end=1.0)
    with pytest.raises(ValueError, match="would wait for ever"):
        predicted([one, other])


WITHIN = 0.15


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_the_predicted_step_is_the_measured_one(degrees: dict[str, int]) -> None:
    """Within 15%, at speeds at which the link is most of the step; the best of some tries, for a busy machine."""
    config = replace(CONFIG, model=GPTConfig(layers=4, hidden=64, heads=4, vocab=512, sequence=64), precision="fp32")
    for _ in range(6):
        row = links.measure(plan(**degrees), config, [link.parse("100mbit"), link.parse("20mbit")], nodes=2)
        off = [abs(cell.predicted / cell.measured - 1) for cell in row.cells]
        if max(off) <= WITHIN:
            break
    assert max(off) <= WITHIN, row
    assert row.cells[1].measured > 1.5 * row.full_speed, "the link is not felt: this shows nothing"


# The real thing.

SCRIPT = """
import json, os, sys
sys.path.insert(0, {tests!r})
from minipar import comm
from test_link import durations
group = comm.connect(int(os.environ["RANK"]), 2, backend="gloo")
print(json.dumps(durations(group, None, {sizes})))
"""


@pytest.fixture
def throttled() -> Iterator[list[list[str]]]:
    """Two network namespaces whose veth pair passes 200 Mbit/s: the words that run a command in each."""
    if not (which("ip") and which("tc")) or os.geteuid() != 0:
        pytest.skip("needs root, and ip and tc (iproute2), to lay a throttled link between two network namespaces")
    names = [f"minipar{os.getpid()}{side}" for side in "ab"]
    run = lambda text: subprocess.run(text.split(), check=True, capture_output=True, text=True)
    try:
        try:
            for name in names:
                run(f"ip netns add {name}")
            run(f"ip link add veth0 netns {names[0]} type veth peer name veth0 netns {names[1]}")
            for place, name in enumerate(names, 1):
                run(f"ip -n {name} addr add 10.77.0.{place}/24 dev veth0")
                run(f"ip -n {name} link set veth0 up")
                run(f"ip -n {name} link set lo up")
                run(f"ip netns exec {name} tc qdisc add dev veth0 root tbf rate 200mbit burst 64kb limit 4mb")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no throttled link can be laid here: {error.stderr.strip()}")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_the_emulated_link_is_as_slow_as_a_throttled_one(throttled: list[list[str]]) -> None:
    sizes = [4 * MEGABYTE, 8 * MEGABYTE]  # large beside the 64 kB that tbf lets through at once
    script = SCRIPT.format(tests=str(Path(__file__).parent), sizes=sizes)
    environ = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29517", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "veth0"}
    ranks = [
        subprocess.Popen(
            [*inside, sys.executable, "-c", script],
            env=os.environ | environ | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, inside in enumerate(throttled)
    ]
    try:
        real = [json.loads(one.communicate(timeout=60)[0]) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    emulated = minipar.run(durations, 2, Network(2, 2, link.parse("200mbit")), sizes)
    for name in real[0]:
        for place, size in enumerate(sizes):
            there, here = (max(rank[name][place] for rank in found) for found in (real, emulated))
            assert here == pytest.approx(there, rel=0.25), (name, size, real, emulated)


# On the command line.


def answer(asked: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(asked)
    return int(stopped.value.code or 0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--nodes", "2"], "go together"),
        (["--link", "1gbit"], "go together"),
        (["--nodes", "3", "--link", "1gbit"], "2 ranks cannot be dealt to 3 nodes: choose nodes from 2"),
        (["--nodes", "2", "--link", "slow"], "is no speed"),
        (["--nodes", "2", "--link", "1gbit", "--steps", "6"], "choose more than 6"),
        (["--nodes", "2", "--link", "1gbit", "--resume", "/nowhere"], "/nowhere"),
    ],
)
def test_a_run_over_no_such_link_is_refused(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["train", "--dp", "2", *options]) == 2
    error = capsys.readouterr().err
    assert told in error and len(error.strip().splitlines()) == 1


def test_a_run_over_a_link_reports_what_was_measured_and_what_was_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["train", "--dp", "2", "--layers", "2", "--hidden", "32", "--global-batch", "4", "--steps", "10"]
    assert answer([*asked, "--nodes", "2", "--link", "10mbit", "--report", str(tmp_path / "slow.json")]) == 0
    assert "2 nodes joined by 10mbit: a step takes" in capsys.readouterr().out
    assert answer([*asked, "--report", str(tmp_path / "fast.json")]) == 0
    slow, fast = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("slow", "fast"))
    net = slow["network"]
    assert slow["losses"] == pytest.approx(fast["losses"], rel=1e-5) and "network" not in fast
    assert (net["nodes"], net["bytes_per_second"], net["steps_at_full_speed"]) == (2, 1.25e6, 6)
    link_seconds = 4 * slow["parameters"] / 1.25e6  # two ranks: half of the gradients, twice
    assert link_seconds < net["predicted_step_seconds"] and link_seconds < net["measured_step_seconds"]
    assert net["full_speed_step_seconds"] < min(net["predicted_step_seconds"], net["measured_step_seconds"])


SMALL = ["--hidden", "16", "--heads", "4", "--vocab", "64", "--sequence", "8", "--global-batch", "4"]


def test_the_table_has_every_layout_and_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["links", "--ranks", "2", "--links", "1gbit,100mbit:1ms", "--micro-batches", "2", *SMALL]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{layout} " in text for layout in ("dp2", "pp2", "tp2"))
    assert "100mbit:1000us" in text and "fastest over 1gbit: " in text
    assert all(len(row) <= 80 for row in text.splitlines())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--links", "soon"], "is no speed"),
        (["--ranks", "3"], "3 ranks cannot be dealt to 2 nodes"),
        (["--layouts", "dp3"], "has 3 ranks and not 4"),
        (["--layouts", "ep4"], "give degrees such as"),
        (["--layouts", "tp4", "--heads", "2"], "cannot be shared by tp=4"),
        (["--report", "/nowhere/at/all.json"], "/nowhere/at"),
    ],
)
def test_tables_that_make_no_sense_are_refused(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["links", *options]) == 2
    error = capsys.readouterr().err
    assert told in error and len(error.strip().splitlines()) == 1


def held_for_long(group: Group) -> float:
    with link.through(group, Network(2, group.size, Link(50e3, 0.0))):
        return float(group.all_reduce(torch.ones(150_000))[0])


@pytest.mark.slow
def test_a_message_that_a_link_holds_for_long_is_no_standstill() -> None:
    """12 seconds, and ranks of which nothing is heard for 10 are stuck."""
    assert minipar.run(held_for_long, 2, timeout=None) == [2.0, 2.0]
