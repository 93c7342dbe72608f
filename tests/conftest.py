"""What several files of tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from minipar import cli


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The reference's tensors are small: a second thread would only take a core from the ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process: its exit code, and what it printed."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


@pytest.fixture(scope="session")
def books() -> dict[str, Any]:
    """Lessons that a test has run, by name: others make a site of them."""
    return {}
