"""The lessons as a learner meets them: in JupyterLab by `minipar lab`, and as pages by `minipar book`."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from browsing import NEEDED, browser, page, run_all, settings, shot

from minipar import book_command, course

pytestmark = [*NEEDED, pytest.mark.slow]
__all__ = ["browser", "page"]  # fixtures


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, psutil.Process]]:
    """The address that `minipar lab` says, and its process."""
    home = tmp_path_factory.mktemp("lab")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "minipar", "lab", "4", "--no-browser", "--port", str(port)]
    with open(home / "log", "w") as log:
        server = subprocess.Popen(command, env=settings(home), stdout=subprocess.PIPE, stderr=log, text=True)
    assert server.stdout is not None
    said = server.stdout.readline()
    found = re.fullmatch(r"4\. Pipeline parallel: (http://127\.0\.0\.1:\d+/lab/tree/04_\S+\?token=\w+)\n", said)
    assert found, said
    started = psutil.Process(server.pid)
    yield found[1], started
    kernels = started.children(recursive=True)
    server.send_signal(signal.SIGINT)
    assert server.wait(30) == 0
    _, alive = psutil.wait_procs(kernels, timeout=10)
    assert not alive
    server.stdout.close()


def test_lesson_4_runs_and_answers_to_slider_and_play_button(
    page: Any, lab: tuple[str, psutil.Process], tmp_path: Path
) -> None:
    outside: list[str] = []
    page.on("request", lambda request: outside.append(request.url))
    page.set_viewport_size({"width": 1400, "height": 9000})  # all cells are in the page
    page.goto(lab[0])
    run_all(page)
    page.locator(".jp-OutputArea-output", has_text="predicted, if all were equally slow:").wait_for(timeout=120_000)
    page.locator(".widget-radio-box input").first.check()
    page.get_by_text("Noted: a quarter.").wait_for()
    picture = page.locator(".widget-html svg[role=img]")
    assert picture.get_attribute("aria-label") == "1F1B, 4 stages, 8 micro-batches: idle 37.5 % of busy time"
    page.locator(".widget-slider [role=slider]").nth(1).focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('.widget-html svg[role=img]').ariaLabel.includes(' 9 micro')")
    player = page.locator(".minipar-player").first
    player.locator("button").click()
    player.locator("input").focus()
    page.keyboard.press("Home")
    assert player.locator(".now").inner_text().startswith("At 0 s: rank 0 F0")
    page.keyboard.press(" ")
    page.wait_for_function("document.querySelector('.minipar-player .now').textContent.includes('rank 1 F0')")
    shot(page, "lesson-4", tmp_path)
    assert not page.locator("[data-mime-type='application/vnd.jupyter.error'], [data-mime-type*=stderr]").count()
    assert all(url.startswith(("http://127.0.0.1:", "data:", "blob:")) for url in outside)


def test_lesson_0_runs_and_a_cell_at_work_is_interrupted(
    page: Any, lab: tuple[str, psutil.Process], tmp_path: Path
) -> None:
    """The last cell stands still on purpose; it says that it goes on, the stop button ends it, and no rank is left."""
    address, server = lab
    page.set_viewport_size({"width": 1400, "height": 7000})
    page.goto(address.replace("/lab/tree/04_pipeline_parallel", "/lab/workspaces/other/tree/00_first_ranks"))
    run_all(page)

    page.locator(".minipar-steps button").nth(1).wait_for(timeout=90_000)
    page.locator(".minipar-steps button").nth(1).click()
    assert page.locator(".minipar-steps output").inner_text() == "2 of 7"
    page.get_by_text("4 ranks at work, ").wait_for(timeout=90_000)
    shot(page, "lesson-0", tmp_path)
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.get_by_text("Interrupt Kernel", exact=True).click()
    page.get_by_text("KeyboardInterrupt").first.wait_for(timeout=20_000)
    assert not page.get_by_text("4 ranks at work, ").count()
    page.get_by_text("| Idle").first.wait_for(timeout=20_000)
    page.wait_for_timeout(1500)
    kept = [child for child in server.children(recursive=True) if "forkserver" in " ".join(child.cmdline())]
    assert len(kept) <= 2 + 4  # servers of two kernels, and the ranks that this notebook's %%ranks keeps


@pytest.fixture(scope="module")
def site(books: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of all lessons, if they have been run already, or of two."""
    every = course.lessons()
    some = every if len(books) == len(every) else course.chosen("0,4")
    ran = {one.path.stem: books.get(one.path.stem) or course.run(one.path) for one in some}
    out = tmp_path_factory.mktemp("site") / "book"
    book_command.build(some, ran, out)
    return out


@pytest.mark.parametrize("width", [1280, 390])
def test_the_book_is_read_without_a_server_and_its_animations_play(
    page: Any, site: Path, width: int, tmp_path: Path
) -> None:
    outside: list[str] = []
    page.on("request", lambda request: outside.append(request.url))
    page.set_viewport_size({"width": width, "height": 1200})
    page.goto((site / "index.html").as_uri())
    page.get_by_role("link", name="4. Pipeline parallel").last.click()
    player = page.locator(".minipar-player").first
    player.scroll_into_view_if_needed()
    page.wait_for_function("document.querySelector('.minipar-player .now').textContent.includes('rank 1 F0')")
    player.locator("button").click()
    assert page.get_by_text("In JupyterLab this picture has sliders.").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth + 1")
    shot(page, f"book-4-{width}", tmp_path)
    page.goto((site / "00_first_ranks.html").as_uri())
    page.locator(".minipar-steps button").nth(1).click()
    assert page.locator(".minipar-steps output").inner_text() == "2 of 7"
    assert page.get_by_text("Before you read on, guess.").count() >= 1
    assert all(url.startswith(("file:", "data:")) for url in outside)
