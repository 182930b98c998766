"""A daemon for Spark's Python workers that has imported the modules they need: ``spark.python.daemon.module``.

With Spark's own daemon, each worker imports Keras and a backend itself, which takes seconds for every worker and every
retried task. Here workers are forked with these modules in memory, which they share. The import does not start a
backend's runtime, so that the fork is safe: threads and devices are created on first use.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

from pyspark import daemon

from distkeras.spark.first_import import import_keras

#: The modules to import, in this order, before Keras, which a cluster may lack.
_MODULES = ("pandas", "pyarrow", "pyspark.worker", "distkeras.transformers.serving", "distkeras.training.task")


def main() -> None:
    """Import the modules, then fork workers until Spark ends the daemon."""
    for name in _MODULES:
        # A module that is missing here is also missing in workers: one that needs it raises the error in its task.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        import_keras()
    gc.freeze()  # so that a worker's collection after each task skips these objects
    daemon.manager()


if __name__ == "__main__":
    main()
