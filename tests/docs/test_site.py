"""Tests of the site, built as a reader would build it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from docsite.command import build
from docsite.pages import home, public
from support.browser import PHONE, chromium

import distkeras
from distkeras.ps.rules import all_rules

# Building the site takes half a minute.
pytestmark = pytest.mark.slow

#: Attributes whose resources a page loads when it is opened.
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href"}


class Page(HTMLParser):
    """The links, the loaded resources, and the link targets of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.text: list[str] = []
        self.formulas = 0
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors.update(name for name in (values.get("id"), values.get("name")) if name)
        if tag == "a" and values.get("href"):
            self.links.append(values["href"] or "")
        if tag in LOADED and values.get(LOADED[tag]) and values.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(values[LOADED[tag]] or "")
        self.formulas += tag == "math"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(folder)
    assert built.returncode == 0, built.stdout
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def internal(pages: dict[Path, Page]) -> Iterator[tuple[Path, str, Path, str]]:
    """Return each link or resource within the site: the page, the link, the file, and the anchor that it leads to."""
    for path, page in pages.items():
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            # The error page is served at the root.
            if not parts.scheme and not parts.netloc and path.name != "404.html":
                target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                yield path, link, target / "index.html" if target.is_dir() else target, unquote(parts.fragment)


def test_every_link_within_the_site_leads_somewhere(pages: dict[Path, Page]) -> None:
    count = 0
    for path, link, target, place in internal(pages):
        assert target.is_file(), f"{path.name}: {link}"
        assert not place or target not in pages or place in pages[target].anchors, f"{path.name}: {link}"
        count += 1
    assert count > len(pages)


def test_every_link_out_of_the_site_is_well_formed(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                assert parts.scheme == "https", f"{path.name}: {link}"
                assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc), f"{path.name}: {link}"


def test_pages_load_nothing_from_another_server(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for link in page.loaded:
            assert not urlsplit(link).netloc, f"{path.name}: {link}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text()), style.name


def test_every_rule_has_a_page_with_its_formulas(site: Path, pages: dict[Path, Page]) -> None:
    for name in all_rules():
        assert pages[site / "rules" / f"{name}.html"].formulas > 0, name


def test_every_formula_is_rendered(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for raw in (":math:", ".. math::", r"\tilde", r"\theta", "--8<--", "<!-- layers"):
            assert raw not in "".join(page.text), f"{path.name}: {raw}"


def test_the_reference_contains_the_public_names(site: Path, pages: dict[Path, Page]) -> None:
    anchors = {anchor for path, page in pages.items() if path.parent.name == "reference" for anchor in page.anchors}
    assert distkeras.__all__
    missing = {name for name, value in public().items() if home(name, value) not in anchors}
    assert not missing


def test_no_page_scrolls_sideways_on_a_phone(site: Path, pages: dict[Path, Page]) -> None:
    with chromium() as browser:
        page = browser.new_page(viewport=PHONE)
        wide = {}
        for path in pages:
            page.goto(path.as_uri(), wait_until="domcontentloaded")
            width = page.evaluate("document.documentElement.scrollWidth")
            if width > PHONE["width"]:
                wide[str(path.relative_to(site))] = width
    assert not wide
