"""One whole job, as somebody's program: ``python whole_job.py KIND FOLDER MODEL EPOCHS RULE``; prints JSON.

KIND is ``keras`` (`fit` on arrays), ``elephas`` (its README's asynchronous training of an RDD), ``plain`` (a `Trainer`
in a Spark session as anybody makes it), ``ready`` (in one of `distkeras.spark.session`), ``warm`` (likewise, the fifth
time in a session). FOLDER has what `bench.start.write_data` wrote there. It runs in an environment that need not have
this project, so it takes nothing from `bench`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGAN = time.time()
HIDDEN = {"M": (1000, 2000, 1000), "S": (128, 128)}
BATCH, WORKERS, WINDOW = 128, 2, 10
MASTER = f"local[{WORKERS},4]"
SESSION = {"spark.driver.memory": "4g", "spark.ui.enabled": "false", "spark.log.level": "ERROR"}
#: Learning rates: AGN divides a window's movement by its steps, DOWNPOUR adds what two workers find.
RATES = {"keras": 0.1, "elephas": 0.1, "agn": 0.2, "downpour": 0.1}
#: Times that one session trains the same, where the session is what is warm.
WARM = 5


def build(name: str, learning_rate: float) -> Any:
    """Model M or S, the same weights each time, compiled."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(units, activation="relu") for units in HIDDEN[name]]
    model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10, activation="softmax")])
    model.compile(keras.optimizers.SGD(learning_rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def plain_keras(folder: Path, model: str, epochs: int, _: str) -> tuple[Any, dict[str, float]]:
    """`fit` on arrays, with both cores."""
    import numpy as np

    x, y = (np.load(folder / f"{name}.npy") for name in ("x", "y"))
    built = build(model, RATES["keras"])
    called = time.time()
    built.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0)
    return built, {"call": time.time() - called}


def elephas(folder: Path, model: str, epochs: int, _: str) -> tuple[Any, dict[str, float]]:
    """Elephas, as its README trains asynchronously."""
    import numpy as np
    from elephas.spark_model import SparkModel  # type: ignore[import-not-found]  # it is in the peer's environment only
    from elephas.utils.rdd_utils import to_simple_rdd  # type: ignore[import-not-found]  # likewise
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(MASTER)
    for name, value in SESSION.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    x, y = (np.load(folder / f"{name}.npy") for name in ("x", "y"))
    called = time.time()
    trainer = SparkModel(build(model, RATES["elephas"]), frequency="epoch", mode="asynchronous", num_workers=WORKERS)
    trainer.fit(to_simple_rdd(spark.sparkContext, x, y), epochs=epochs, batch_size=BATCH, verbose=0, validation_split=0)
    took = {"call": time.time() - called}
    return trainer.master_network, took


def distkeras(
    folder: Path, model: str, epochs: int, rule: str, *, ready: bool, times: int = 1
) -> tuple[Any, dict[str, float]]:
    """`Trainer` on Parquet."""
    if ready:
        from distkeras.spark import session

        spark = session(MASTER, config=SESSION)
    else:
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master(MASTER)
        for name, value in SESSION.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
    from distkeras import Trainer, rules

    rows = spark.read.parquet(str(folder / "rows"))
    rows = rows.cache() if times > 1 else rows
    for _ in range(times):
        called = time.time()
        trainer = Trainer(
            build(model, RATES[rule]),
            rules.make(rule, window=WINDOW),
            num_workers=WORKERS,
            batch_size=BATCH,
            num_epoch=epochs,
            progress=False,
        )
        trained = trainer.train(rows)
        took = {"call": time.time() - called}
    ((first,),) = trainer.history.selectExpr("double(min(timestamp))").collect()
    return trained, took | {"first step": first - called}


KINDS: dict[str, Callable[[Path, str, int, str], tuple[Any, dict[str, float]]]] = {
    "keras": plain_keras,
    "elephas": elephas,
    "plain": lambda *job: distkeras(*job, ready=False),
    "ready": lambda *job: distkeras(*job, ready=True),
    "warm": lambda *job: distkeras(*job, ready=True, times=WARM),
}


def main() -> None:
    """Trains, and says how long it took and how good the model is."""
    import numpy as np

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    kind, folder, model, epochs, rule = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
    trained, took = KINDS[kind](folder, model, epochs, rule)
    took["program"] = time.time() - BEGAN
    x, y = (np.load(folder / f"{name}_test.npy") for name in ("x", "y"))
    took["accuracy"] = trained.evaluate(x, y, batch_size=1000, verbose=0, return_dict=True)["accuracy"]
    sys.stdout.write(f"\n{json.dumps(took)}\n")


if __name__ == "__main__":
    main()
