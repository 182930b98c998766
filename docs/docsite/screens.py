"""The pictures of the dashboard in `docs/assets`: the present page, with records that are the same each time."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from support.training.recorded_job import RecordedJob, record_of

from distkeras.dashboard.page import saved_page
from distkeras.dashboard.watch import Journal, read_since

#: Scrolls to an element.
_SCROLL = "what => scrollTo(0, document.querySelector(what).getBoundingClientRect().top - 12)"
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Screen:
    """One picture: what the page shows, in which window, from which element on, and which worker is chosen."""

    workers: int
    width: int
    height: int
    scheme: Literal["light", "dark"] = "light"
    top: str = ""
    worker: str = ""
    options: dict[str, Any] = field(default_factory=dict)


#: File name to picture.
SCREENS = {
    "dashboard.png": Screen(4, 1120, 1160, options={"seconds": 150.0, "monitor": "accuracy"}),
    "dashboard-many.png": Screen(200, 1120, 690, top="figure.plot", worker="7", options={"seconds": 60.0}),
    "dashboard-phone.png": Screen(4, 390, 760, "dark", options={"seconds": 150.0, "monitor": "accuracy"}),
}


def _html(screen: Screen) -> str:
    """Return the page of a job that trains."""
    job = RecordedJob(screen.workers, **screen.options)
    record = record_of(job)
    record.now = replace(record.now, saved_clock=len(job.commits) - 10, saved_seconds=12.0)
    with tempfile.TemporaryDirectory(prefix="distkeras-screens-") as folder:
        journal = Path(folder) / "journal.jsonl"
        Journal(journal).begin(record.whole())
        return saved_page([read_since(journal)])


def take() -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each picture; none without Pillow, Playwright and Chromium."""
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    try:
        from PIL import Image
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        return
    if program is None:
        return
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, screen in SCREENS.items():
            page = browser.new_page(
                viewport={"width": screen.width, "height": screen.height}, color_scheme=screen.scheme
            )
            page.set_content(_html(screen))
            page.locator("figure.plot canvas").first.wait_for()
            if screen.worker:
                page.get_by_label("Worker").first.select_option(label=screen.worker)
            if screen.top:
                page.evaluate(_SCROLL, screen.top)
            picture = io.BytesIO()
            Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(128).save(picture, "PNG", optimize=True)
            yield name, picture.getvalue()
        browser.close()
