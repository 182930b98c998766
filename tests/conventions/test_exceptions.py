"""Tests that an exception to a rule of the linters is explained in its line."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from support.sources import PACKAGE, name_of, sources, text_of

#: Both kinds of exceptions, in a comment; after the codes, a dash or another comment with words is expected.
EXCEPTION = re.compile(r"#\s*(?:noqa|type:\s*ignore)(?P<codes>: ?[A-Z\d, ]+|\[[\w, -]+\])?(?P<rest>.*)")


def unexplained(text: str) -> Iterator[int]:
    """Yield the lines of ``text`` whose exception has no code or no reason."""
    if not EXCEPTION.search(text):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        found = EXCEPTION.match(token.string) if token.type == tokenize.COMMENT else None
        if found and not (found["codes"] and re.match(r"\s*(?:- |# )\S", found["rest"])):
            yield token.start[0]


def test_every_exception_has_a_reason() -> None:
    paths = sources(*PACKAGE, "benchmarks", "docs", "notebooks", "scripts", "tests")
    found = [f"{name_of(path)}:{line}" for path in paths for line in unexplained(text_of(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "explained"),
    [
        ("x = 1  # noqa: E402 - only where it is there", True),
        ("x = 1  # noqa: E402, F401 - only where Spark is there", True),
        ("x = 1  # type: ignore[arg-type]  # that is what is refused", True),
        ("x = 1  # noqa: E402", False),
        ("x = 1  # noqa", False),
        ("x = 1  # noqa - because", False),
        ("x = 1  # type: ignore[arg-type]", False),
        ("x = 1  # type: ignore  # because", False),
        ("x = '# noqa'", True),
    ],
)
def test_exceptions_without_a_reason_are_found(line: str, explained: bool) -> None:
    assert list(unexplained(line + "\n")) == ([] if explained else [1])
