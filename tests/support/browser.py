"""A real browser without a window."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield Chromium, or skip the test if it or Playwright is not installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def ink(page: Any, plot: int = 0) -> int:
    """Return the number of pixels of a chart that are drawn on."""
    page.locator("figure.plot").nth(plot).scroll_into_view_if_needed()
    page.locator("figure.plot").nth(plot).locator("canvas").wait_for()
    return int(
        page.evaluate(
            """number => {
                const canvas = document.querySelectorAll('figure.plot')[number].querySelector('canvas');
                const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
                let count = 0;
                for (let place = 3; place < data.length; place += 4) count += data[place] > 0;
                return count;
            }""",
            plot,
        )
    )


def colored(page: Any, share: float) -> int:
    """Count the pixels at a fraction of the first chart's width that have the color of the line of all workers."""
    page.locator("figure.plot canvas").first.wait_for()
    return int(
        page.evaluate(
            """share => {
                const over = document.querySelector('.u-over').getBoundingClientRect();
                const canvas = document.querySelector('figure.plot canvas');
                const x = over.left - canvas.getBoundingClientRect().left + share * over.width;
                const data = canvas.getContext('2d').getImageData(x * devicePixelRatio, 0, 1, canvas.height).data;
                let count = 0;
                for (let place = 0; place < data.length; place += 4) {
                    count += data[place + 3] > 200 && data[place] + data[place + 1] + data[place + 2] < 150;
                }
                return count;
            }""",
            share,
        )
    )


def violations(page: Any) -> list[str]:
    """Return the violations that axe finds with all of its rules, one line each."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response
    nodes = lambda one: [node["html"][:200] for node in one["nodes"]][:4]  # noqa: E731 - a word for what follows
    return [f"{one['id']}: {one['help']}: {nodes(one)}" for one in found["violations"]]
