"""A daemon for Spark's Python workers that has imported the modules they need: ``spark.python.daemon.module``.

With Spark's own daemon, each worker imports Keras and a backend itself, which takes seconds for every worker and every
retried task. Here workers are forked with these modules in memory, which they share. The import does not start a
backend's runtime, so that the fork is safe: threads and devices are created on first use.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable
from typing import Any

from pyspark import daemon

from distkeras.spark.first_import import import_keras

#: The modules to import, in this order, before Keras, which a cluster may lack.
_MODULES = ("pandas", "pyarrow", "pyspark.worker", "distkeras.transformers.serving", "distkeras.training.task")


def _without_traces(worker: Callable[..., int]) -> Callable[..., int]:
    """Return Spark's ``worker``, which is silent if the JVM closes the connection before the last row, as in `show`."""

    def silent(*arguments: Any) -> int:
        try:
            return worker(*arguments)
        except BrokenPipeError:
            return 1  # not to be reused

    return silent


def main() -> None:
    """Import the modules, then fork workers until Spark ends the daemon."""
    for name in _MODULES:
        # A module that is missing here is also missing in workers: one that needs it raises the error in its task.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        import_keras()
    gc.freeze()  # so that a worker's collection after each task skips these objects
    daemon.worker = _without_traces(daemon.worker)
    daemon.manager()


if __name__ == "__main__":
    main()
