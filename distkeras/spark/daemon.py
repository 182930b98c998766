"""A daemon for Spark's Python workers that has imported what they need: ``spark.python.daemon.module``.

Spark's own forks workers, of which each imports Keras and a backend by itself: seconds for every worker, and for every
retried task. Here a worker is forked with all that in its memory, which it shares with the others. Importing starts
nothing of a backend's runtime, so that the fork is safe: threads and devices come with the first use.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

from pyspark import daemon

from distkeras.spark.first_import import import_keras

#: What a worker would import itself, one after the other, before Keras, which a cluster may do without.
_MODULES = ("pandas", "pyarrow", "pyspark.worker", "distkeras.transformers.serving", "distkeras.training.task")


def main() -> None:
    """Import, then fork workers until Spark ends the daemon."""
    for name in _MODULES:
        # What cannot be imported here cannot be there either: the worker that needs it says so, in its task.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        import_keras()
    gc.freeze()  # a worker collects after each task, and need not walk through all this
    daemon.manager()


if __name__ == "__main__":
    main()
