"""What a model learns under the default rule, next to what `keras.Model.fit` teaches it in as many epochs.

Needs the extra `study`. ::

    python benchmarks/tuning/defaults.py            # every data set, optimizer and number of workers: ten minutes
    python benchmarks/tuning/defaults.py --many     # 8 to 64 workers, in the simulator
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pandas as pd

from distkeras import KerasEstimator, KerasGradient, datasets, simulate, timing
from distkeras.settings import DEFAULT_RULE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "tuning"
WORKERS, MANY, SEEDS, BATCH = (2, 4), (8, 16, 64), (1, 2), 32
RULES = {"default": None, "dynsgd": "dynsgd", "agn": "agn"}


@dataclass(frozen=True)
class Rows:
    """A data set: rows to learn from and rows to test on, and how many epochs a model gets.

    Args:
        classes: number of classes; 0 for a number to predict, with variance 1.
        hidden: units of the model's hidden layers.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    classes: int
    hidden: tuple[int, ...]
    epochs: int

    def model(self, seed: int) -> keras.Model:
        """Return a new perceptron, whose weights the seed decides."""
        keras.utils.set_random_seed(seed)
        last = keras.layers.Dense(self.classes or 1, activation="softmax" if self.classes else None)
        hidden = [keras.layers.Dense(units, activation="relu") for units in self.hidden]
        return keras.Sequential([keras.Input(self.x.shape[1:]), *hidden, last])

    @property
    def loss(self) -> str:
        """Return the loss that fits the labels."""
        return "sparse_categorical_crossentropy" if self.classes else "mse"

    def score(self, model: keras.Model) -> float:
        """Return the accuracy in percent on the test rows, or the share of the variance that is explained."""
        out = model.predict(self.test_x, verbose=0, batch_size=1024)
        if not self.classes:
            return 100 * (1 - float(np.mean((out[:, 0] - self.test_y) ** 2)))
        return 100 * float(np.mean(out.argmax(1) == self.test_y))


def _cut(name: str, x: np.ndarray, y: np.ndarray, classes: int, hidden: tuple[int, ...], epochs: int) -> Rows:
    """Return standardized rows, a quarter of them to test on."""
    order = np.random.default_rng(7).permutation(len(x))
    x, y, test = x[order], y[order], len(x) // 4
    x = (x - x[test:].mean(0)) / (x[test:].std(0) + 1e-6)
    if not classes:
        y = (y - y[test:].mean()) / y[test:].std()
    x, y = x.astype(np.float32), y.astype(np.int64 if classes else np.float32)
    return Rows(name, x[test:], y[test:], x[:test], y[:test], classes, hidden, epochs)


def data_sets() -> Iterator[Rows]:
    """Yield the data sets: one of this project, two that scikit-learn has, and two that it draws."""
    from sklearn import datasets as others

    (x, y), (test_x, test_y) = datasets.fashion_mnist()
    flat = [part.reshape(len(part), -1).astype(np.float32) / 255 for part in (x[:16_384], test_x)]
    yield Rows("Fashion-MNIST, 16,384 images", flat[0], y[:16_384], flat[1], test_y, 10, (128, 128), 3)
    digits, cancer = others.load_digits(), others.load_breast_cancer()
    yield _cut("digits of scikit-learn", digits.data, digits.target, 10, (64,), 8)
    yield _cut("breast cancer of scikit-learn", cancer.data, cancer.target, 2, (32,), 8)
    x, y = others.make_classification(20_000, n_informative=8, n_classes=3, n_clusters_per_class=4, random_state=1)
    yield _cut("twelve clusters, drawn", x, y, 3, (64, 64), 4)
    x, y = others.make_friedman1(20_000, noise=1.0, random_state=3)
    yield _cut("Friedman's first function, drawn", x, y, 0, (64, 64), 4)


OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "Adam": keras.optimizers.Adam,
    "SGD": keras.optimizers.SGD,
}


def fitted(rows: Rows, optimizer: str, seed: int) -> float:
    """Return what `fit` reaches."""
    model = rows.model(seed)
    model.compile(OPTIMIZERS[optimizer](), rows.loss)
    model.fit(rows.x, rows.y, batch_size=BATCH, epochs=rows.epochs, verbose=0)
    return rows.score(model)


def trained(rows: Rows, df: DataFrame, optimizer: str, seed: int, workers: int, rule: Any) -> float:
    """Return what workers on Spark reach."""
    estimator = KerasEstimator(
        rows.model(seed), rule, optimizer=OPTIMIZERS[optimizer](), loss=rows.loss, num_workers=workers,
        epochs=rows.epochs, batch_size=BATCH, seed=seed, verbose=0,
    )  # fmt: skip
    return rows.score(estimator.fit(df).keras_model)


def measure(spark: SparkSession) -> Iterator[dict[str, Any]]:
    """Yield the mean score of each data set, optimizer, rule and number of workers; ``fit`` has one worker."""
    for rows in data_sets():
        df = spark.createDataFrame(pd.DataFrame({"features": list(rows.x), "label": rows.y})).cache()
        for optimizer in OPTIMIZERS:
            case = {"data": rows.name, "optimizer": optimizer, "epochs": rows.epochs}
            scores = [fitted(rows, optimizer, seed) for seed in SEEDS]
            yield case | {"rule": "fit", "workers": 1, "score": round(float(np.mean(scores)), 2)}
            for name, rule in RULES.items():
                for workers in WORKERS:
                    scores = [trained(rows, df, optimizer, seed, workers, rule) for seed in SEEDS]
                    yield case | {"rule": name, "workers": workers, "score": round(float(np.mean(scores)), 2)}
        df.unpersist()


def simulated() -> Iterator[dict[str, Any]]:
    """Yield the score of many workers, with plain SGD at the rate with which `fit` trains."""
    for rows in data_sets():
        for workers in MANY:
            model = rows.model(SEEDS[0])
            gradient = KerasGradient(model, rows.x, rows.y, loss=rows.loss, batch_size=BATCH, workers=workers)
            rule, batches = DEFAULT_RULE.for_workers(workers), rows.epochs * len(rows.x) // BATCH
            trace = simulate(
                rule, gradient.theta0, gradient, workers=workers, learning_rate=0.01, timing=timing.Gamma(),
                steps=max(1, batches // int(rule.window or 1)), dtype=np.float32, seed=SEEDS[0],
            )  # fmt: skip
            score = round(rows.score(gradient.model_with(trace.theta)), 2)
            case = {"data": rows.name, "optimizer": "SGD", "epochs": rows.epochs}
            yield case | {"rule": "default", "workers": workers, "score": score}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write one line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--many", action="store_true", help="simulate 8 to 64 workers")
    options = parser.parse_args(argv)
    path = FOLDER / ("defaults_many.json" if options.many else "defaults.json")
    lines = []
    if options.many:
        found = simulated()
    else:
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master(f"local[{max(WORKERS)},4]").config("spark.ui.enabled", "false")
        spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
        found = measure(spark)
    for figure in found:
        print(figure, flush=True)
        lines.append(json.dumps(figure))
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
