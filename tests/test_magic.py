"""`%%ranks` in an IPython shell, and minipar in a real notebook kernel."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import minipar

pytest.importorskip("IPython")

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

ROOT = Path(minipar.__file__).parents[1]
Run = Callable[..., str]


def plain(text: str) -> str:
    """Without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InteractiveShell]:
    config = Config()
    config.HistoryManager.enabled = False
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VIRTUAL_ENV", raising=False)  # IPython warns of one that is active and is not this
        shell = InteractiveShell.instance(config=config, ipython_dir=str(tmp_path_factory.mktemp("ipython")))
    shell.run_line_magic("load_ext", "minipar")
    yield shell
    shell.run_line_magic("ranks", "stop")
    InteractiveShell.clear_instance()


@pytest.fixture
def cell(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `%%ranks options` over a cell; what the notebook shows, errors too."""

    def run(options: str, source: str) -> str:
        shell.run_cell(f"%%ranks {options}\n{source}", store_history=True)
        shown = capsys.readouterr()
        return plain(shown.out + shown.err)

    return run


def test_a_cell_runs_on_each_rank_and_equal_values_are_shown_once(cell: Run) -> None:
    shown = cell("3", "x = torch.tensor(float(rank))\ngroup.all_reduce(x)")
    assert shown.splitlines()[-1] == "[ranks 0-2] tensor(3.)"
    assert cell("3", "rank, size, group.name") == "".join(f"[rank {r}] ({r}, 3, 'world')\n" for r in range(3))


def test_ranks_keep_their_variables(cell: Run) -> None:
    assert cell("3", "kept = 10 + rank") == ""
    assert cell("", "kept") == "[rank 0] 10\n[rank 1] 11\n[rank 2] 12\n"
    assert cell("3", "kept;") == ""


def test_functions_and_classes_of_a_cell_are_kept(cell: Run) -> None:
    cell(
        "3",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    n: int\ndef double(a):\n    return A(2 * a.n)",
    )
    assert cell("3", "double(A(2))") == "[ranks 0-2] A(n=4)\n"


def test_only_some_ranks_are_spoken_to(cell: Run) -> None:
    cell("3", "heard = 'no'")
    cell("3 --only 0,2", "heard = 'yes'")
    assert cell("3", "heard") == "[ranks 0,2] 'yes'\n[rank 1] 'no'\n"
    assert cell("--only 1-2", "rank") == "[rank 1] 1\n[rank 2] 2\n"


def test_variables_are_pushed_and_pulled(cell: Run, shell: InteractiveShell) -> None:
    shell.run_cell("factor = 5\ndef scale(x):\n    return factor * x")
    cell("3 --push factor,scale --pull result,rank", "result = scale(rank) + factor")
    assert (shell.user_ns["result"], shell.user_ns["rank"]) == ([5, 10, 15], [0, 1, 2])
    cell("3 --only 2 --pull result", "0;")
    assert shell.user_ns["result"] == [15]


def test_an_error_names_rank_and_line_and_keeps_ranks_in_step(cell: Run) -> None:
    cell("3", "kept = 7")
    shown = cell("3", "a = 1\nif rank == 1:\n    raise ValueError('cell trouble')")
    assert shown.startswith("RankError: rank 1 raised ValueError: cell trouble\n")
    assert re.search(r'File "<cell \d+>", line 4, in <module>\n    raise ValueError', shown)  # line 1 is %%ranks
    assert "magic.py" not in shown and "cells.py" not in shown and "launch.py" not in shown
    assert cell("", "kept") == "[ranks 0-2] 7\n"


def test_calls_that_differ_are_explained_unless_that_is_off(cell: Run) -> None:
    shown = cell("2", "group.all_reduce(torch.ones(rank + 1))")
    assert "rank 0 calls all_reduce of 1 float32" in shown and "rank 1 calls all_reduce of 2 float32" in shown
    shown = cell("2 --no-check", "group.all_reduce(torch.ones(1000 if rank == 0 else 1))")
    assert "rank 1 was killed by signal 6 (SIGABRT)" in shown


def test_stuck_ranks_are_told_and_end(cell: Run) -> None:
    shown = cell("2 --timeout 1", "x = torch.ones(1)\ngroup.recv(x, 1 - rank)")
    assert "2 ranks ended, and their variables are gone" in shown
    assert "RankError: all ranks are stuck:" in shown
    assert re.search(r"rank 0 waits for recv from rank 1 in world, at <cell \d+>:3: group.recv\(x, 1 - rank\)", shown)
    assert cell("", "size") == "[ranks 0,1] 2\n"


def test_another_number_of_ranks_starts_anew_and_says_so(cell: Run) -> None:
    cell("2", "kept = 1")
    shown = cell("1", "'kept' in globals()")
    assert shown == "2 ranks ended, and their variables are gone; 1 rank start\n[rank 0] False\n"


def test_a_mesh_is_there_when_its_degrees_are_given(cell: Run) -> None:
    shown = cell("2 --dp 2", "mesh.dp.rank, mesh.dp.size, mesh.pp.size")
    assert shown.endswith("[rank 0] (0, 2, 1)\n[rank 1] (1, 2, 1)\n")


def test_a_syntax_error_is_shown_once_and_nothing_is_sent(cell: Run) -> None:
    cell("2", "kept = 1")
    shown = cell("2", "kept = 2\nx x")
    assert shown.count("SyntaxError") == 1 and re.search(r'File "<cell \d+>", line 3', shown) and "rank" not in shown
    assert cell("2", "kept") == "[ranks 0,1] 1\n"


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ("x", "invalid int value: 'x'"),
        ("0", "choose a number of ranks from 1"),
        ("2 --nonsense", "unrecognized arguments: --nonsense"),
        ("2 --only 0,7", "there are ranks 0 to 1"),
        ("2 --only a", "'a' is not a list of ranks"),
        ("8 --pp 2", "pp 2 x dp 1 x tp 1 = 2 ranks, but 8 are asked for"),
        ("2 --push nothing", "no variable nothing"),
        ("2 --pull nothing", "no variable nothing on ranks 0,1"),
        ("2 --timeout soon", "invalid float value: 'soon'"),
    ],
)
def test_a_wrong_option_is_one_clear_line(cell: Run, options: str, advice: str) -> None:
    cell("2", "0;")
    shown = cell(options, "0;")
    assert shown.startswith("UsageError: ") and advice in shown and shown.count("\n") == 1


def test_the_line_magic_tells_and_stops(cell: Run, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    cell("2", "0;")
    for order, answer in (
        ("", r"2 ranks since \d+:\d+, \d+ cells run"),
        ("stop", "2 ranks stopped"),
        ("", "no ranks: .*"),
    ):
        shell.run_line_magic("ranks", order)
        assert re.fullmatch(answer + "\n", capsys.readouterr().out)


# A real notebook kernel.


class Kernel:
    def __init__(self, directory: Path) -> None:
        from jupyter_client.manager import start_new_kernel

        paths = {"IPYTHONDIR": str(directory), "TMPDIR": str(directory), "PYTHONPATH": str(ROOT)}
        self.manager, self.client = start_new_kernel(kernel_name="python3", env=os.environ | paths)
        self.pid = self.manager.provisioner.process.pid

    def start(self, source: str) -> str:
        return str(self.client.execute(source))

    def finish(self, request: str, until: str = "") -> str:
        """What the cell shows, until it ends (or until `until` has been shown)."""
        shown = ""
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                shown += content["text"]
            elif kind == "error":
                shown += "\n".join(content["traceback"])
            elif kind == "execute_result":
                shown += content["data"]["text/plain"]
            elif kind == "status" and content["execution_state"] == "idle":
                return plain(shown)
            if until and until in shown:
                return plain(shown)

    def run(self, source: str) -> str:
        return self.finish(self.start(source))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    yield kernel
    family = psutil.Process(kernel.pid).children(recursive=True)
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)
    _, alive = psutil.wait_procs(family, timeout=5)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_a_function_from_a_cell_runs_on_ranks_and_its_output_folds(kernel: Kernel) -> None:
    kernel.run("import minipar, torch")
    kernel.run("def hello(group):\n    group.barrier()\n    print('hello')\n    return group.rank")
    shown = kernel.run("minipar.run(hello, 4)")
    if "[ranks 0-3] hello" not in shown:  # on a busy machine, twins may come too late
        shown = kernel.run("minipar.run(hello, 4)")
    assert shown == "[ranks 0-3] hello\n[0, 1, 2, 3]"


def test_an_error_in_a_notebook_is_its_message_with_the_cell(kernel: Kernel) -> None:
    kernel.run("def trouble(group):\n    if group.rank:\n        raise ValueError('in a cell')")
    shown = kernel.run("minipar.run(trouble, 2)")
    assert re.match(r"RankError: rank 1 raised ValueError: in a cell\nTraceback .*\n  File \"In\[\d+]\", line 3", shown)
    assert shown.endswith("raise ValueError('in a cell')")


def test_a_deadlock_in_a_notebook_shows_the_line_of_the_cell(kernel: Kernel) -> None:
    kernel.run("def stuck(group):\n    print('waiting')\n    group.recv(torch.ones(1), 1 - group.rank)")
    shown = kernel.run("minipar.run(stuck, 2, timeout=1)")
    assert re.search(r"rank 1 waits for recv from rank 0 in world, at In\[\d+]:3 in stuck: group.recv\(", shown)


def test_interrupt_ends_the_ranks_and_the_notebook_lives_on(kernel: Kernel) -> None:
    request = kernel.start("minipar.run(stuck, 2)")
    kernel.finish(request, until="waiting")
    time.sleep(0.3)
    pressed = time.monotonic()
    kernel.manager.interrupt_kernel()
    assert "KeyboardInterrupt" in kernel.finish(request)
    assert time.monotonic() - pressed < 3
    assert kernel.run("minipar.run(lambda group: group.size, 2)") == "[2, 2]"


def test_ranks_magic_works_in_a_notebook(kernel: Kernel) -> None:
    assert kernel.run("%load_ext minipar") == ""
    assert kernel.run("%%ranks 4\ngroup.all_reduce(torch.tensor(rank))") == "[ranks 0-3] tensor(6)\n"
    request = kernel.start("%%ranks 4\nprint('waiting')\ngroup.recv(torch.ones(1), (rank + 1) % size)")
    kernel.finish(request, until="waiting")
    time.sleep(0.3)
    kernel.manager.interrupt_kernel()
    assert "4 ranks ended, and their variables are gone" in kernel.finish(request)
    assert kernel.run("%%ranks\nsize") == "[ranks 0-3] 4\n"
