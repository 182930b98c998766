"""The first import of Keras in a process: a third shorter than Python's own.

It takes longer than a small model's epochs, each Python worker of a session that has no daemon for it pays it, and
no one should wait for modules that are not needed.
"""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: What Keras imports only if it is there, for pictures of its own; half a second, and executors draw none.
_NOT_NEEDED = "matplotlib"


def import_keras(*, on_driver: bool = False) -> None:
    """Import Keras with its backend, which `archive.ensure_backend` has chosen, unless this process has them.

    Args:
        on_driver: the user may draw pictures, and has objects that the collector must not take for permanent.
    """
    if "keras" in sys.modules:
        return
    # A collection would look through hundreds of thousands of objects that are there to stay, a hundred times.
    collects = gc.isenabled()
    gc.disable()
    try:
        with nullcontext() if on_driver else _absent_here():
            importlib.import_module("keras")
        if not on_driver:
            gc.freeze()  # nor need a later collection look through them, or one between two tasks
    finally:
        if collects:
            gc.enable()


@contextmanager
def _absent_here() -> Iterator[None]:
    finder = _Absent()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Absent(MetaPathFinder):
    """Hides `_NOT_NEEDED` from one thread; others, which may decode rows meanwhile, find it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _NOT_NEEDED and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{fullname} is not imported on executors, which draw no plots", name=fullname)
        return None
