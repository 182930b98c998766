"""A browser for a module, and pages in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.browser import DESKTOP, chromium
from support.patience import patience


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page; at the end, nothing has gone wrong in it and nothing was asked for elsewhere."""
    opened: list[tuple[Any, str, list[str]]] = []

    def visit(
        url: str, *, fails: str = "401", scheme: str = "light", viewport: dict[str, int] = DESKTOP, **options: Any
    ) -> Any:
        context = browser.new_context(viewport=viewport, color_scheme=scheme, **options)
        context.set_default_timeout(1000 * patience(10))
        page = context.new_page()
        troubles: list[str] = []
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.on("dialog", lambda dialog: troubles.append(dialog.message))
        page.on("request", lambda request: troubles.append(request.url) if not_ours(request.url, url) else None)
        page.goto(url)
        opened.append((context, fails, troubles))
        return page

    yield visit
    for context, fails, troubles in opened:
        context.close()
        expected = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED", "ERR_EMPTY_RESPONSE", "401", fails)
        assert [text for text in troubles if not any(word in text for word in expected)] == []


def not_ours(asked: str, url: str) -> bool:
    """Whether a page has asked elsewhere than where it came from."""
    parts = urlsplit(url)
    return not asked.startswith(("data:", "blob:", f"{parts.scheme}://{parts.netloc}/"))
