"""Tests of the page as text: foreign text is never HTML in it, and its policy allows only its own script and style."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from distkeras.dashboard.page import live_page, saved_page, server_page
from distkeras.dashboard.watch import Entry

EVIL = "</script><script>alert(1)</script><!--<script> & \u2028 \"' <img src=x onerror=alert(1)>"
STATIC = files("distkeras.dashboard") / "static"


class Parsed(HTMLParser):
    """The elements of a page, as a browser parses them."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=False)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.elements[-1][0] if self.elements else "", []).append(data)


def saved(text: str = EVIL) -> str:
    line = json.dumps({"kind": "whole", "metrics": [text], "why": text})
    return saved_page([[Entry("x-1", line)]], [text])


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_foreign_texts_are_embedded_unchanged_as_data() -> None:
    html = saved()
    parsed = Parsed(html)
    scripts = [attributes for tag, attributes in parsed.elements if tag == "script"]
    assert [attributes.get("type") for attributes in scripts] == ["application/json", None]
    assert not [tag for tag, _ in parsed.elements if tag == "img"]
    embedded = json.loads(re.findall(r'id="data">(.*?)</script>', html, re.S)[0])
    assert embedded["names"] == [EVIL]
    assert embedded["journals"][0][0]["why"] == EVIL


#: Constructs that turn a text into HTML or code.
MAKERS = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|setTimeout\(\"")


@pytest.mark.parametrize("kind", ["live", "server", "saved"])
def test_only_the_page_s_own_script_and_style_may_run(kind: str) -> None:
    if kind == "saved":
        html = saved()
        (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)">', html)
    else:
        page = live_page(2) if kind == "live" else server_page()
        html, policy = page.html.decode(), page.policy
        assert "frame-ancestors 'none'" in policy
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.S)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.S)
    directives = dict(part.split(" ", 1) for part in policy.split("; "))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == hash_of(script)
    assert directives["style-src"] == hash_of(style)
    assert "unsafe" not in policy


def test_a_page_loads_nothing_from_another_server() -> None:
    for html in (saved(), live_page(1).html.decode(), server_page().html.decode()):
        for tag, attributes in Parsed(html).elements:
            assert not re.match(r"(https?:)?//", attributes.get("src") or attributes.get("href") or ""), tag
    own = "".join((STATIC / name).read_text(encoding="utf-8") for name in names() if not name.startswith("uPlot"))
    assert not re.findall(r"https?://", own)


def names() -> list[str]:
    return sorted(entry.name for entry in STATIC.iterdir())


def test_the_script_never_turns_text_into_html() -> None:
    for name in names():
        if name.endswith(".js") and not name.startswith("uPlot"):
            assert not MAKERS.findall((STATIC / name).read_text(encoding="utf-8")), name


def test_the_files_contain_nothing_that_a_browser_changes_before_hashing() -> None:
    """A browser first turns carriage returns into line feeds, and ends a script at a closing tag within it."""
    for name in names():
        text = (STATIC / name).read_bytes()
        assert b"\r" not in text, name
        assert b"\0" not in text, name
        if name.endswith(".js"):
            assert not re.search(rb"</script|<!--", text, re.I), name


def test_every_script_is_short() -> None:
    lengths = {name: (STATIC / name).read_text(encoding="utf-8").count("\n") for name in names() if "uPlot" not in name}
    assert len(lengths) >= 9
    assert not [f"{name}: {lines} lines" for name, lines in lengths.items() if lines > 400]


def test_the_library_s_license_is_in_its_folder() -> None:
    text = (STATIC / "uPlot.LICENSE").read_text(encoding="utf-8")
    assert "MIT License" in text
    assert "Leon Sorokin" in text


def test_the_files_are_package_data(tmp_path: Path) -> None:
    """The files are read as a package's data, so they are also found in a zip."""
    assert {"page.css", "page.js", "uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE"} <= set(names())
