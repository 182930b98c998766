"""Values whose type includes None, but which must not be None in a test."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """Return ``value``, or fail if it is None. Functions that run in Spark's workers must not use this."""
    assert value is not None
    return value
