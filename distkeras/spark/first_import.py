"""The first import of Keras in a process, in two thirds of the usual time.

It takes longer than a small model's epochs, and without the daemon each Python worker of a session repeats it.
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

#: Keras imports it if it is installed, to draw plots. That takes half a second, and executors draw none.
_NOT_NEEDED = "matplotlib"


def import_keras(*, on_driver: bool = False) -> None:
    """Import Keras with its backend, which `archive.ensure_backend` has chosen, unless this process has them.

    Args:
        on_driver: the user may draw plots, and has objects that the garbage collector must not freeze.
    """
    if "keras" in sys.modules:
        return
    # During the import, a hundred collections would traverse hundreds of thousands of permanent objects.
    collects = gc.isenabled()
    gc.disable()
    try:
        with nullcontext() if on_driver else _absent_here():
            importlib.import_module("keras")
        if not on_driver:
            gc.freeze()  # so that later collections skip them
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
    """Hides `_NOT_NEEDED` from one thread; other threads, which may decode rows at the same time, can import it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _NOT_NEEDED and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{fullname} is not imported on executors, which draw no plots", name=fullname)
        return None
