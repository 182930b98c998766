"""Train, predict and evaluate on JAX in Spark, and print what the Python workers have imported.

As a program it prints one line of JSON: for each of the three, whether a worker that took part has imported TensorFlow.
The variable ``NOTES`` of the environment, which Spark's workers have, too, is an empty folder for them to write to.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class Watch(MetaPathFinder):
    """Notes in a folder that this process computes, and that it imports TensorFlow, before or later."""

    def __init__(self) -> None:
        self.note("computed")
        if "tensorflow" in sys.modules:
            self.note("imported")

    def note(self, what: str) -> None:
        Path(os.environ["NOTES"], f"{what}-{os.getpid()}").touch()

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname == "tensorflow":
            self.note("imported")


def found(folder: Path) -> list[bool]:
    """Return for each worker that has computed since the last call whether it has imported TensorFlow."""
    computed = [note for note in folder.glob("computed-*") if not note.name.endswith(f"-{os.getpid()}")]
    for note in computed:
        note.unlink()
    return [(folder / note.name.replace("computed", "imported")).exists() for note in computed]


def main() -> None:
    """Run the job, its predictions and an evaluation, and print what was found."""
    import keras

    import distkeras
    from distkeras.spark import session

    class Marking(keras.layers.Layer):
        """Watches the process that computes with it."""

        def call(self, inputs: Any) -> Any:
            sys.meta_path.insert(0, Watch())
            return inputs

    spark = session("local[2,2]", config={"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("OFF")
    rows = spark.range(64, numPartitions=2).selectExpr("array(sin(id), cos(id)) AS features", "int(id % 2) AS label")
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)
    # A bidirectional layer reads the configuration of the layer in it, and an optimizer with a schedule that of this.
    layers = keras.layers.Reshape((2, 1)), keras.layers.Bidirectional(keras.layers.SimpleRNN(2)), Marking()
    model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(2, "softmax")])
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    estimator = distkeras.KerasEstimator(
        model, epochs=2, num_workers=2, batch_size=8, custom_objects={"Marking": Marking}
    )
    results, folder = {}, Path(os.environ["NOTES"])
    fitted = estimator.fit(rows)
    results["training"] = found(folder)
    fitted.transform(rows).collect()
    results["prediction"] = found(folder)
    fitted.evaluate(rows)
    results["evaluation"] = found(folder)
    sys.stdout.write(json.dumps(results) + "\n")
    spark.stop()


if __name__ == "__main__":
    main()
