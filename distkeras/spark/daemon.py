"""A daemon for Spark's Python workers that has imported the modules they need: ``spark.python.daemon.module``.

With Spark's own daemon, each worker imports Keras and a backend itself, which takes seconds for every worker and every
retried task. Here workers are forked with these modules in memory, which they share. The import does not start a
backend's runtime, so that the fork is safe, and a worker can choose its GPU: threads and devices are created on first
use. Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from distkeras.private_keras import leave_tensorflow_out

#: The modules to import, in this order, before Keras, which a cluster may lack.
_MODULES = ("pandas", "pyarrow", "pyspark.worker", "distkeras.transformers.serving", "distkeras.training.task")
#: Keras imports it if it is installed, to draw plots. That takes half a second, and executors draw none.
_NOT_NEEDED = "matplotlib"


def import_keras(*, on_driver: bool = False) -> None:
    """Import Keras with its backend, which `archive.ensure_backend` has chosen, in two thirds of the usual time.

    A driver's user may draw plots, and has objects that the garbage collector must not freeze.
    """
    if "keras" in sys.modules:
        return
    # During the import, a hundred collections would traverse hundreds of thousands of permanent objects.
    collects = gc.isenabled()
    gc.disable()
    try:
        with contextlib.nullcontext() if on_driver else _absent_here():
            importlib.import_module("keras")
        leave_tensorflow_out()
        if not on_driver:
            gc.freeze()  # so that later collections skip them
            _compute_in_callers_thread()
    finally:
        if collects:
            gc.enable()


def _compute_in_callers_thread() -> None:
    """Let JAX not hand each call to another thread: a worker waits for the result, and its cores have other work."""
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.config.update("jax_cpu_enable_async_dispatch", False)


@contextlib.contextmanager
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


def without_traces(worker: Callable[..., int]) -> Callable[..., int]:
    """Return Spark's ``worker``, which is silent if the JVM closes the connection before the last row, as in `show`."""

    def silent(*arguments: Any) -> int:
        try:
            return worker(*arguments)
        except BrokenPipeError:
            return 1  # not to be reused

    return silent


def main() -> None:
    """Import the modules, then fork workers until Spark ends the daemon."""
    from pyspark import daemon

    # Keras looks for GPUs when it imports PyTorch, which by default starts CUDA: it cannot be used after a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for name in _MODULES:
        # A module that is missing here is also missing in workers: one that needs it raises the error in its task.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        import_keras()
    gc.freeze()  # so that a worker's collection after each task skips these objects
    daemon.worker = without_traces(daemon.worker)
    daemon.manager()


if __name__ == "__main__":
    main()
