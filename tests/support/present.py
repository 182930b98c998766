"""Values that may be None, where a test knows that they are not."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """``value``, which fails the test where it is None. Not for functions that run in Spark's workers."""
    assert value is not None
    return value
