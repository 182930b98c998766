"""A driver of jobs on an executor that has two GPUs, as far as Spark knows: it believes its discovery script.

``python gpu_job.py FOLDER`` trains, evaluates and predicts three times, two tasks at once. A task writes a file into
``FOLDER/seen``, named by stage, process and address, with the variables it sees. The executor lists devices 4 and 5.
The program prints the error of a rule that needs more workers at once than there are GPUs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from distkeras import KerasEstimator
from distkeras.ps.errors import ConfigurationError
from distkeras.settings import grouped
from distkeras.spark import session

JOBS = 3
_DISCOVERY = '#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0", "1"]}\'\n'


def recording_layer(folder: str) -> keras.Layer:
    """Return a layer that returns its input, and writes down in tasks what their process sees."""

    @keras.saving.register_keras_serializable("tests")
    class Recording(keras.layers.Layer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.supports_jit = False  # a Python call cannot be compiled

        def record(self) -> np.float32:
            from pyspark import TaskContext

            context = TaskContext.get()
            if context is not None:
                name = f"{context.stageId()} {os.getpid()} {','.join(context.resources()['gpu'].addresses)}"
                seen = [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH")]
                Path(folder, name).write_text(" ".join(map(str, seen)))
            return np.float32(0)

        def call(self, x: Any) -> Any:
            import tensorflow as tf

            nothing = tf.numpy_function(self.record, [], tf.float32)
            nothing.set_shape(())
            return x + nothing

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    return Recording()


def cluster(script: Path) -> SparkSession:
    """Return a session with one executor of three cores and two GPUs, in which no task may fail."""
    gpus: dict[str, str] = {}
    for owner in ("worker", "executor"):
        gpus |= {f"spark.{owner}.resource.gpu.amount": "2", f"spark.{owner}.resource.gpu.discoveryScript": str(script)}
    config = {
        **gpus,
        "spark.task.resource.gpu.amount": "1",
        "spark.executorEnv.CUDA_VISIBLE_DEVICES": "4,5",
        "spark.task.maxFailures": "1",
        "spark.executor.memory": "1g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    return session("local-cluster[1,3,1024]", config=config, warm_up=False)


def main() -> None:
    """Run all jobs."""
    folder = Path(sys.argv[1])
    script, seen = folder / "gpus.sh", folder / "seen"
    script.write_text(_DISCOVERY)
    script.chmod(0o755)
    seen.mkdir()
    spark = cluster(script)
    spark.sparkContext.setLogLevel("OFF")
    rows = spark.range(64, numPartitions=2).select(
        F.array(F.rand(0), F.rand(1)).cast("array<float>").alias("features"), F.rand(2).cast("float").alias("label")
    )
    model = keras.Sequential([keras.Input((2,)), recording_layer(str(seen)), keras.layers.Dense(1)])
    options: dict[str, Any] = {"worker_optimizer": "sgd", "loss": "mse", "batch_size": 8, "host": "127.0.0.1"}
    try:
        KerasEstimator(model, "ssgd", **grouped({**options, "num_workers": 3})).fit(rows)
    except ConfigurationError as error:
        print(error)  # noqa: T201 - read by the test
    for _ in range(JOBS):
        fitted = KerasEstimator(model, "ssgd", **grouped({**options, "num_workers": 2})).fit(rows)
        fitted.evaluate(rows)
        fitted.transform(rows).select("prediction").collect()
    spark.stop()


if __name__ == "__main__":
    main()
