"""Tests that the errors quoted by the page "Questions and troubleshooting" are raised by the code."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from support.sources import PACKAGE, nodes_of, sources, tree_of

from distkeras.ps import errors

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "faq.md"
#: The page wraps long messages.
QUOTED = [
    (kind, " ".join(text.split("\n")))
    for kind, text in re.findall(r"^```text\n(\w+Error): (.*?)\n```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
]
#: The least number of fixed letters in a message, apart from what is filled in.
LETTERS = 20


@functools.cache
def messages() -> set[tuple[str | None, ...]]:
    """Return the pieces of every message of the sources; None is where a value is filled in."""
    found = set()
    for path in sources(*PACKAGE):
        for node in nodes_of(tree_of(path)):
            pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
            values = [piece.value if isinstance(piece, ast.Constant) else None for piece in pieces]
            texts = tuple(value if isinstance(value, str) else None for value in values)
            known = "".join(filter(None, texts))
            if " " in known.strip() and len(known) >= LETTERS:
                found.add(texts)
    return found


def is_raised(quoted: str) -> bool:
    """Return whether some message is in ``quoted``, with any text for the values."""
    return any(
        re.search("".join(".*" if text is None else re.escape(text) for text in texts), quoted)
        for texts in messages()
        if all(text in quoted for text in texts if text is not None)
    )


def test_the_page_quotes_errors() -> None:
    assert len(QUOTED) > 10


@pytest.mark.parametrize(("kind", "text"), QUOTED, ids=[kind for kind, _ in QUOTED])
def test_a_quoted_error_is_raised_somewhere(kind: str, text: str) -> None:
    assert kind in {error.__name__ for error in errors.ERRORS}
    assert is_raised(text)


def test_another_text_matches_no_message() -> None:
    assert not is_raised("the executors must start another Python")
