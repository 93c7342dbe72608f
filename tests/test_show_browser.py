"""Drawings, animations and the explorer as a person meets them: in a real browser, by mouse and keyboard.

Needs Chromium (`apt-get install chromium`) and playwright; the explorer also JupyterLab.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from browsing import NEEDED, browser, page, run_all, settings, shot

from minipar import ledger, show
from minipar.facts import Traffic, Volume
from minipar.mesh import plan
from minipar.schedule import gpipe, interleaved, one_f_one_b, zb_h1
from minipar.show.drawing import page as page_of
from minipar.simulate import simulate

pytestmark = NEEDED
__all__ = ["browser", "page"]  # fixtures


def open_page(page: Any, tmp_path: Path, html: str) -> None:
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    page.goto((tmp_path / "page.html").as_uri())


# Drawings.

OUTSIDE = """
() => [...document.querySelectorAll('svg')].flatMap(svg => {
  const paper = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < paper.left - 1 || box.right > paper.right + 1 || box.top < paper.top - 1
      || box.bottom > paper.bottom + 1;
  }).map(text => text.textContent);
})
"""

COVERED = """
() => [...document.querySelectorAll('svg')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
  const found = [];
  boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
    const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (width > 2 && height > 4) found.push(`${one} / ${other}`);
  }));
  return found;
})
"""


def test_no_text_leaves_its_paper_or_covers_another(page: Any, tmp_path: Path) -> None:
    """Measured with the letters that this browser draws."""
    states = {f"ZeRO {zero}": ledger.model_state_bytes(7e9, dp=8, zero=zero) for zero in range(4)}
    traffic = Traffic({("tp", "all_reduce"): Volume(48, 3_100_000), ("dp", "all_reduce"): Volume(3, 1_640_000)})
    predicted = simulate(one_f_one_b(4, 8), 0.01, 0.01, 0.01)
    measured = simulate(one_f_one_b(4, 8), 0.0103, 0.0104, 0.0101, send=0.001)
    drawings = [
        show.timeline(one_f_one_b(4, 8)),
        show.timeline(zb_h1(4, 8)),
        show.timeline(interleaved(4, 8, 2)),
        show.timeline(gpipe(8, 32)),
        show.compare([gpipe(4, 8), one_f_one_b(4, 8), interleaved(4, 8, 4), zb_h1(4, 8)], memory=True),
        show.overlay(measured, predicted, "1F1B"),
        show.mesh(plan(2, 2, 2), traffic, ranks_per_node=4),
        show.mesh(plan(4, 16, 8), traffic),
        show.memory(states, limit_bytes=80e9),
        show.columns(),
        show.rows(),
        show.heads(),
    ]
    page.set_viewport_size({"width": 1500, "height": 1000})
    for drawing in drawings:
        open_page(page, tmp_path, page_of(drawing.title, drawing.svg))
        assert page.evaluate(OUTSIDE) == [], drawing.title
        assert page.evaluate(COVERED) == [], drawing.title


# Animations.


def test_an_animation_plays_pauses_and_is_pulled(page: Any, tmp_path: Path) -> None:
    """In an exported page, without a kernel: by its buttons, the space bar and the arrow keys."""
    animated = show.animate(one_f_one_b(4, 8), send=0.5, autoplay=False)
    animated.save(tmp_path / "page.html")
    page.goto((tmp_path / "page.html").as_uri())
    button, slider, now = page.locator("button"), page.locator("input[type=range]"), page.locator(".now")
    at = lambda: float(page.locator(".playhead").get_attribute("x1"))
    begin = at()
    assert "At 0 s: rank 0 F0, rank 1 idle" in now.inner_text() and button.inner_text() == "Play"
    button.click()
    page.wait_for_function("document.querySelector('.dots circle') !== null")  # a message is on its way
    assert at() > begin and button.inner_text() == "Pause"
    shot(page, "animation", tmp_path)
    page.keyboard.press(" ")  # the button has the focus
    assert button.inner_text() == "Play"
    paused = at()
    page.wait_for_timeout(150)
    assert at() == paused
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert at() > paused
    page.keyboard.press("ArrowLeft")
    assert at() == pytest.approx(paused, abs=0.01)
    page.keyboard.press(" ")
    assert button.inner_text() == "Pause"
    page.keyboard.press("End")
    assert button.inner_text() == "Play"
    idle = animated.title.split("idle ")[1]
    assert now.inner_text() == f"The step is done: idle {idle}"
    assert slider.get_attribute("aria-valuetext") == now.inner_text()
    page.mouse.click(slider.bounding_box()["x"] + slider.bounding_box()["width"] / 2, slider.bounding_box()["y"] + 12)
    half = simulate(one_f_one_b(4, 8), send=0.5).duration / 2
    assert float(slider.input_value()) == pytest.approx(half, rel=0.05)


def test_the_focus_is_seen(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, page_of("", show.animate(one_f_one_b(2, 2), autoplay=False).html))
    for _ in range(3):
        page.keyboard.press("Tab")
        style = page.evaluate("getComputedStyle(document.activeElement).outline")
        assert "rgb(138, 63, 252)" in style and "3px" in style


def test_animations_share_a_page_and_play_one_by_one(page: Any, tmp_path: Path) -> None:
    html = "".join(show.animate(order, autoplay=False).html for order in (one_f_one_b(2, 2), gpipe(3, 4), zb_h1(4, 4)))
    open_page(page, tmp_path, page_of("three", html))
    texts = lambda: page.locator(".now").all_inner_texts()
    before = texts()
    page.locator("button").nth(1).click()
    page.wait_for_timeout(400)
    page.locator("button").nth(1).click()
    after = texts()
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_an_animation_starts_by_itself_unless_less_motion_is_wanted(browser: Any, motion: str, tmp_path: Path) -> None:
    page = browser.new_page(reduced_motion=motion)
    open_page(page, tmp_path, page_of("", show.animate(one_f_one_b(3, 4)).html))
    page.wait_for_timeout(500)
    still = page.locator(".now").inner_text().startswith("At 0 s")
    assert still == (motion == "reduce")
    page.close()


def test_without_javascript_the_whole_picture_is_there(browser: Any, tmp_path: Path) -> None:
    page = browser.new_context(java_script_enabled=False).new_page()
    open_page(page, tmp_path, page_of("", show.animate(one_f_one_b(3, 4)).html))
    assert page.locator(".veil").get_attribute("width") == "0"
    assert not page.locator(".controls").is_visible()
    page.context.close()


# The explorer in JupyterLab.


def notebook(*cells: str) -> str:
    made = [
        {"cell_type": "code", "id": f"c{i}", "execution_count": None, "metadata": {}, "outputs": [], "source": source}
        for i, source in enumerate(cells)
    ]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a JupyterLab of our own, with a notebook explorer.ipynb; its settings are in the test's folder."""
    if find_spec("jupyterlab") is None or find_spec("ipywidgets") is None:
        pytest.skip("jupyterlab or ipywidgets is not installed: pip install jupyterlab ipywidgets")
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    cells = (
        "from minipar import show\nshow.explorer()",
        "from minipar.schedule import one_f_one_b\nshow.animate(one_f_one_b(3, 4), send=0.5)",
    )
    (work / "explorer.ipynb").write_text(notebook(*cells))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += [f"--ServerApp.root_dir={work}", "--IdentityProvider.token=", "--LabApp.extension_manager=readonly"]
    with open(tmp_path / "lab.log", "w") as log:
        server = subprocess.Popen(command, env=settings(home), stdout=log, stderr=log)
        try:
            wait_for(f"http://127.0.0.1:{port}/api", server)
            yield f"http://127.0.0.1:{port}/lab/tree/explorer.ipynb"
        finally:
            server.terminate()
            server.wait(20)


def wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    """Until the server answers."""
    end = time.monotonic() + 60
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail("JupyterLab did not start")


def test_the_explorer_follows_its_sliders_in_jupyterlab(page: Any, lab: str, tmp_path: Path) -> None:
    """A slider is moved by keyboard; the one picture follows, says in place what cannot be, and comes back."""
    page.set_viewport_size({"width": 1500, "height": 1100})
    page.goto(lab)
    run_all(page)
    picture = page.locator(".widget-html svg")
    picture.wait_for(timeout=30_000)
    title = lambda: picture.get_attribute("aria-label")
    assert title() == "1F1B, 4 stages, 8 micro-batches: idle 37.5 % of busy time"
    micro_batches = page.locator(".widget-slider [role=slider]").nth(1)
    micro_batches.focus()
    for wanted in range(9, 13):
        page.keyboard.press("ArrowRight")
        page.wait_for_function(f"document.querySelector('.widget-html svg').ariaLabel.includes(' {wanted} micro')")
    assert title() == "1F1B, 4 stages, 12 micro-batches: idle 25 % of busy time"
    assert picture.count() == 1
    shot(page, "explorer", tmp_path)
    page.locator(".widget-dropdown select").select_option("Interleaved 1F1B")
    page.wait_for_function("document.querySelector('.widget-html svg').ariaLabel.startsWith('Interleaved')")
    micro_batches.focus()
    page.keyboard.press("ArrowRight")
    alert = page.locator(".widget-html [role=alert]")
    alert.wait_for()
    assert alert.inner_text().startswith("interleaved: 13 micro-batches do not fill rounds of 4 ranks")
    shot(page, "explorer-refused", tmp_path)
    page.keyboard.press("ArrowLeft")
    alert.wait_for(state="detached")
    assert title() == "Interleaved 1F1B, 4 ranks of 2 stages, 12 micro-batches: idle 12.5 % of busy time"
    assert picture.count() == 1
    player_moves(page)


def player_moves(page: Any) -> None:
    """The animation of the notebook's other cell answers to the keyboard, and the notebook does not."""
    cells = page.locator(".jp-Notebook .jp-Cell").count()
    slider, now = page.locator(".minipar-player input"), page.locator(".minipar-player .now")
    slider.focus()
    page.keyboard.press("Home")
    assert now.inner_text().startswith("At 0 s: rank 0 F0")
    page.keyboard.press("ArrowRight")
    assert now.inner_text().startswith("At 1 s: rank 0 F1")
    page.keyboard.press(" ")
    page.wait_for_function("document.querySelector('.minipar-player .now').textContent.includes('rank 1 F0')")
    page.keyboard.press(" ")
    assert page.locator(".minipar-player button").inner_text() == "Play"
    assert page.locator(".jp-Notebook .jp-Cell").count() == cells
