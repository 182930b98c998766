"""Faults that are planted in the code under simulation and removed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

#: A replacement: an object, the name of its attribute, and the replaced value.
Patch = tuple[Any, str, Any]

MUTATIONS: dict[str, Callable[[], list[Patch]]] = {}


def mutation(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Add a fault to `MUTATIONS` under the name of the function that makes it."""
    MUTATIONS[make.__name__.strip("_").replace("_", "-")] = make
    return make


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Run the context with one of `MUTATIONS`."""
    patches = [mock.patch.object(*patch) for patch in MUTATIONS[name]()]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def nothing(*arguments: Any, **options: Any) -> None:
    """Do nothing, in place of a check."""
