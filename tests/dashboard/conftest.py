"""Fixtures that provide a browser for each module and open pages in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.browser import DESKTOP, chromium
from support.patience import patience
from support.training.recorded_job import RecordedJob, write_journal

from distkeras.dashboard.dashboard import Dashboard
from distkeras.dashboard.watch import JobWatch


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a page; afterwards check that the page had no errors and sent no requests
    elsewhere.
    """
    opened: list[tuple[Any, str, list[str]]] = []

    def visit(
        url: str, *, fails: str = "401", scheme: str = "light", viewport: dict[str, int] = DESKTOP, **options: Any
    ) -> Any:
        context = browser.new_context(viewport=viewport, color_scheme=scheme, **options)
        context.set_default_timeout(1000 * patience(10))
        page = context.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on(
            "dialog", lambda dialog: dialog.accept() if dialog.type == "confirm" else problems.append(dialog.message)
        )
        page.on("request", lambda request: problems.append(request.url) if is_foreign(request.url, url) else None)
        page.goto(url)
        opened.append((context, fails, problems))
        return page

    yield visit
    for context, fails, problems in opened:
        context.close()
        expected = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED", "ERR_EMPTY_RESPONSE", "401", fails)
        assert [text for text in problems if not any(word in text for word in expected)] == []


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., str]:
    """Return a function that saves a page of some jobs and returns its address."""

    def saved(*jobs: RecordedJob, **texts: str) -> str:
        watches = []
        for number, job in enumerate(jobs):
            watches.append(JobWatch(tmp_path / f"{number}.jsonl"))
            write_journal(watches[-1].path, job, **texts)
        with Dashboard(watches) as dashboard:
            return dashboard.save(tmp_path / "job.html").as_uri()

    return saved


def is_foreign(requested: str, url: str) -> bool:
    """Return whether a request goes to another origin than the page's."""
    parts = urlsplit(url)
    return not requested.startswith(("data:", "blob:", f"{parts.scheme}://{parts.netloc}/"))
