"""Spark's daemon, which forks its Python workers, with TensorFlow imported: a worker need not, which takes seconds.

It lies in a folder of its own, since that is on the workers' path, and they shall know nothing of the tests.
"""

from __future__ import annotations

import gc

import keras
import pandas
import pyarrow
from pyspark import daemon, worker

#: What a worker would import itself, one after the other.
WARM = (keras, pandas, pyarrow, worker)

if __name__ == "__main__":
    gc.freeze()  # a worker collects after each task, and need not walk through all this
    daemon.manager()
