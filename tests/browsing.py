"""What tests in a real browser share: Chromium, a page whose errors fail the test, screenshots.

Screenshots go to the folder in MINIPAR_SCREENSHOTS, if there is one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ("disable-gpu", "disable-quic", "no-first-run", "disable-component-update", "disable-sync", "no-sandbox")
FLAGS = [f"--{flag}" for flag in (*QUIET, "disable-background-networking")]

NEEDED = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed: apt-get install chromium"),
    pytest.mark.skipif(find_spec("playwright") is None, reason="playwright is not installed: pip install playwright"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """An empty page; what goes wrong in it fails the test."""
    found = browser.new_page(viewport={"width": 1280, "height": 1100}, reduced_motion="no-preference")
    errors: list[str] = []
    found.on("pageerror", lambda error: errors.append(str(error)))
    yield found
    found.close()
    assert errors == []


def shot(page: Any, name: str, tmp_path: Path) -> None:
    """A screenshot, kept where the environment says."""
    folder = Path(os.environ.get("MINIPAR_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(folder / f"{name}.png"))
    assert (folder / f"{name}.png").stat().st_size > 10_000


def settings(home: Path) -> dict[str, str]:
    """An environment in which JupyterLab keeps everything in `home`, asks nothing and saves nothing by itself."""
    for name, text in (
        ("apputils-extension/notification", '{"fetchNews": "false", "checkForUpdates": false}'),
        ("docmanager-extension/plugin", '{"autosave": false}'),
    ):
        file = home / "config/lab/user-settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    folders = {f"JUPYTER_{name.upper()}_DIR": str(home / name) for name in ("config", "data", "runtime")}
    return {**os.environ, **folders, "IPYTHONDIR": str(home / "ipython"), "MINIPAR_CACHE": str(home / "cache")}


def run_all(page: Any) -> None:
    """Run all cells of the notebook that is open, by the menu, once its kernel is there."""
    page.get_by_text("| Idle").first.wait_for(timeout=60_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
