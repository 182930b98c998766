"""One whole job, as a user's program: ``python whole_job.py KIND FOLDER MODEL EPOCHS RULE``; prints JSON.

KIND is a key of `KINDS`. FOLDER has the data from `bench.start.write_data`. The environment need not have this project,
so that this module does not import `bench`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

BEGAN = time.time()
#: Hidden layers between 784 inputs and 10 classes: M has 4.8 million parameters (19.2 MB), S 0.12 million (0.47 MB).
HIDDEN = {"M": (1000, 2000, 1000), "S": (128, 128)}
BATCH, WORKERS = 128, 2
MASTER = f"local[{WORKERS},4]"
SESSION = {"spark.driver.memory": "4g", "spark.ui.enabled": "false", "spark.log.level": "ERROR"}
#: Learning rates: AGN divides a window's movement by its steps, DOWNPOUR adds the movements of two workers.
RATES = {"keras": 0.1, "elephas": 0.1, "agn": 0.3, "downpour": 0.1}
#: The ``steps_per_execution`` of plain Keras, with which its `fit` is fastest.
EXECUTIONS = {"S": 50, "M": 10}
#: Steps from one exchange to the next: AGN's commit is the mean of a window's steps; DOWNPOUR's is their sum.
WINDOWS = {"agn": 3, "downpour": 10}
#: The number of equal trainings in one session, for jobs in a warm session.
WARM = 5
#: The number of folds and the factors on the learning rate of a cross-validation.
FOLDS, FACTORS = 3, (0.25, 0.5, 1.0, 1.5)

#: The trained model, and seconds by the name of the part.
Result = tuple[Any, dict[str, float]]


def build(name: str, learning_rate: float, steps_per_execution: int = 1, layers: Sequence[Any] = ()) -> Any:
    """Return model M or S, or one of other hidden ``layers``, compiled, with the same weights each time."""
    import keras

    keras.utils.set_random_seed(0)
    layers = layers or [keras.layers.Dense(units, activation="relu") for units in HIDDEN[name]]
    # The softmax of float16 would round the loss.
    last = keras.layers.Dense(10, activation="softmax", dtype="float32")
    model = keras.Sequential([keras.Input((784,)), *layers, last])
    model.compile(
        keras.optimizers.SGD(learning_rate),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    return model


def arrays(folder: Path) -> tuple[Any, Any]:
    """Return features float32 ``(60000, 784)`` and labels int32 ``(60000,)``."""
    import numpy as np

    return np.load(folder / "x.npy"), np.load(folder / "y.npy")


def folds(x: Any, y: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the training rows of each of `FOLDS` models."""
    import numpy as np

    fold = np.random.default_rng(0).integers(0, FOLDS, len(x))
    for number in range(FOLDS):
        yield x[fold != number], y[fold != number]


def plain_session() -> Any:
    """Return a Spark session with default settings."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(MASTER)
    for name, value in SESSION.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def ready_session() -> Any:
    """Return a session of `distkeras.spark`."""
    from distkeras.spark import session

    return session(MASTER, config=SESSION)


def fit_keras(model: str, x: Any, y: Any, epochs: int, factor: float) -> Any:
    """Return the model that `fit` trains on arrays, with both cores."""
    built = build(model, factor * RATES["keras"], EXECUTIONS[model])
    built.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0)
    return built


def plain_keras(folder: Path, model: str, epochs: int, _: str) -> Result:
    """Run `fit`, without the time to build the model."""
    x, y = arrays(folder)
    built = build(model, RATES["keras"], EXECUTIONS[model])
    called = time.time()
    built.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0)
    return built, {"call": time.time() - called}


def fit_elephas(spark: Any, model: str, x: Any, y: Any, epochs: int, factor: float) -> Any:
    """Return the model that elephas trains asynchronously on an RDD, as in its README."""
    from elephas.spark_model import SparkModel  # type: ignore[import-not-found]  # only in the peer's environment
    from elephas.utils.rdd_utils import to_simple_rdd  # type: ignore[import-not-found]  # as above

    built = build(model, factor * RATES["elephas"])
    trainer = SparkModel(built, frequency="epoch", mode="asynchronous", num_workers=WORKERS)
    trainer.fit(to_simple_rdd(spark.sparkContext, x, y), epochs=epochs, batch_size=BATCH, verbose=0, validation_split=0)
    return trainer.master_network


def elephas(folder: Path, model: str, epochs: int, _: str) -> Result:
    """Run one training of elephas."""
    spark = plain_session()
    x, y = arrays(folder)
    called = time.time()
    trained = fit_elephas(spark, model, x, y, epochs, 1.0)
    return trained, {"call": time.time() - called}


def many(folder: Path, model: str, epochs: int, _: str, *, peer: str) -> Result:
    """Run as many trainings as a cross-validation, in one session."""
    fit = partial(fit_elephas, plain_session()) if peer == "elephas" else fit_keras
    x, y = arrays(folder)
    called = time.time()
    for rows in folds(x, y):
        for factor in FACTORS:
            trained = fit(model, *rows, epochs, factor)
    return trained, {"call": time.time() - called}


def settings(epochs: int) -> dict[str, Any]:
    """Return the arguments of every job of this project."""
    from distkeras import Monitoring

    monitoring = Monitoring(progress=False)
    return {"num_workers": WORKERS, "batch_size": BATCH, "num_epoch": epochs, "monitoring": monitoring}


def distkeras(
    folder: Path, model: str, epochs: int, rule: str, *, session: Callable[[], Any], times: int = 1
) -> Result:
    """Run `Trainer` on Parquet or, if it runs more than once, on cached rows."""
    rows = session().read.parquet(str(folder / "rows"))
    rows = rows.cache() if times > 1 else rows
    for _ in range(times):
        called = time.time()
        from distkeras import Trainer, rules  # The import counts.

        trainer = Trainer(build(model, RATES[rule]), rules.make(rule, window=WINDOWS[rule]), **settings(epochs))
        trained = trainer.train(rows)
        took = {"call": time.time() - called}
    ((first,),) = trainer.history.selectExpr("double(min(timestamp))").collect()
    return trained, took | {"first step": first - called}


def cross_validation(folder: Path, model: str, epochs: int, rule: str) -> Result:
    """Run `pyspark.ml`'s cross-validation, over learning rates."""
    import keras
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    from distkeras import KerasEstimator, rules

    rows = ready_session().read.parquet(str(folder / "rows"))
    estimator = KerasEstimator(build(model, RATES[rule]), rules.make(rule, window=WINDOWS[rule]), **settings(epochs))
    optimizers = [keras.optimizers.SGD(factor * RATES[rule]) for factor in FACTORS]
    grid = ParamGridBuilder().addGrid(estimator.getParam("worker_optimizer"), optimizers).build()
    judge = MulticlassClassificationEvaluator(metricName="accuracy")
    called = time.time()
    options: dict[str, Any] = {"estimator": estimator, "estimatorParamMaps": grid, "evaluator": judge}
    best: Any = CrossValidator(**options, numFolds=FOLDS, seed=0).fit(rows).bestModel
    return best.keras_model, {"call": time.time() - called}


def python_workers() -> list[int]:
    """Return the pids of Spark's Python workers on this machine, which its daemons have forked."""
    parents, daemons = {}, set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # The process has ended in the meantime.
            continue
        if b"-m" in words and any(word.endswith(b"daemon") for word in words):
            daemons.add(int(folder.name))
    return [pid for pid in daemons if parents[pid] in daemons]


KINDS: dict[str, Callable[[Path, str, int, str], Result]] = {
    "keras": plain_keras,
    "elephas": elephas,
    # A `Trainer` in a session with default settings, and in ours.
    "plain": partial(distkeras, session=plain_session),
    "ready": partial(distkeras, session=ready_session),
    # The last of several equal trainings in one session.
    "warm": partial(distkeras, session=ready_session, times=WARM),
    "many of keras": partial(many, peer="keras"),
    "many of elephas": partial(many, peer="elephas"),
    "many": cross_validation,
}


def main() -> None:
    """Train, and print the times and the accuracy of the model."""
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
