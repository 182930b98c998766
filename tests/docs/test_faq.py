"""Tests that the errors quoted by the page "Questions and troubleshooting" are raised by the code."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

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
def messages() -> list[re.Pattern[str]]:
    """Return every message of the sources as a pattern that accepts any text where a value is filled in."""
    found = set()
    for folder in ("distkeras", "ps", "transformers"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
                texts = [piece.value if isinstance(piece, ast.Constant) else None for piece in pieces]
                known = [text for text in texts if isinstance(text, str)]
                if " " in "".join(known).strip() and sum(map(len, known)) >= LETTERS:
                    found.add("".join(re.escape(text) if isinstance(text, str) else ".*" for text in texts))
    return [re.compile(pattern) for pattern in found]


def test_the_page_quotes_errors() -> None:
    assert len(QUOTED) > 10


@pytest.mark.parametrize(("kind", "text"), QUOTED, ids=[kind for kind, _ in QUOTED])
def test_a_quoted_error_is_raised_somewhere(kind: str, text: str) -> None:
    assert kind in {error.__name__ for error in errors.ERRORS}
    assert any(message.search(text) for message in messages()), text


def test_another_text_matches_no_message() -> None:
    assert not any(message.search("the executors must start another Python") for message in messages())
