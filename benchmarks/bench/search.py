"""A search over learning rates that ends poor ones early, by successive halving, compared with the whole grid."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.measure import Case, Factory
from bench.workload import CLASSES, INPUTS, WORKERS, session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SECTION = "search"
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
EPOCHS, BATCH, HIDDEN = 16, 128, 512
#: Epochs of the first rung, and the factor between rungs, of the number of trials and of epochs.
FIRST_EPOCHS, FACTOR = 2, 4
#: Rows to train on, and to evaluate on.
ROWS, VALIDATION_ROWS = 50_000, 10_000


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    return [partial(_rates, RATES[1::2] if quick else RATES, ROWS // 10 if quick else ROWS)]


@contextmanager
def _rates(rates: tuple[float, ...], count: int) -> Iterator[Case]:
    with session() as spark, tempfile.TemporaryDirectory(prefix="distkeras-bench-") as folder:
        df, validation = _frames(spark, count, Path(folder))
        search = _Search(df, validation, rates, Path(folder))
        search.halving(seed=0)  # This run is a warm-up.
        search.found.clear()
        seeds = iter(range(1, 1000))  # Each turn has another order of the rates.
        yield Case(
            SECTION,
            f"{len(rates)} learning rates, {EPOCHS} epochs, Fashion-MNIST",
            "settings/s",
            lambda: search.halving(seed=next(seeds)),
            None,
            search.grid,
            target_naive=2.0,
            turns=3,
            once=True,
            note=search.note,
        )


def _frames(spark: Any, count: int, folder: Path) -> tuple[DataFrame, DataFrame]:
    """Return cached rows for training and for validation."""
    from distkeras.data.datasets import fashion_mnist, write_parquet

    (x, y), _ = fashion_mnist()
    frames = []
    for name, part in (("train", slice(count)), ("validation", slice(ROWS, ROWS + VALIDATION_ROWS))):
        write_parquet(folder / name, x[part], y[part])
        frames.append(spark.read.parquet(str(folder / name)).cache())
        frames[-1].count()
    return frames[0], frames[1]


class _Search:
    """Searches for the best of some learning rates, with a record of the result and the work of each search."""

    def __init__(self, df: DataFrame, validation: DataFrame, rates: tuple[float, ...], folder: Path) -> None:
        self._df, self._validation, self._rates, self._folder = df, validation, rates, folder
        #: The name, the best rate, the epochs and the jobs of each search.
        self.found: list[tuple[str, float, int, int]] = []

    def halving(self, *, seed: int) -> float:
        """Search in rungs, with the rates in an order that depends on ``seed``; return settings a second."""
        from distkeras import SuccessiveHalving

        rates = np.random.default_rng(seed).permutation(self._rates).tolist()
        search = SuccessiveHalving(rates, EPOCHS, first_epochs=FIRST_EPOCHS, factor=FACTOR, mode="max")
        began, epochs, jobs = time.perf_counter(), 0, 0
        with tempfile.TemporaryDirectory(prefix="search-", dir=self._folder) as folder:
            for rung in search:
                for trial in rung:
                    trained, place = max(trial.values, default=0), f"{folder}/{trial.number}"
                    trial.report(self._train(trial.setting, trial.epochs, checkpoint=place, resume=trained > 0))
                    epochs, jobs = epochs + trial.epochs - trained, jobs + 1
        self.found.append(("halving", search.best.setting, epochs, jobs))
        return len(rates) / (time.perf_counter() - began)

    def grid(self) -> float:
        """Train all rates to the end; return settings a second."""
        began = time.perf_counter()
        values = {rate: self._train(rate, EPOCHS) for rate in self._rates}
        self.found.append(("grid", max(values, key=values.__getitem__), EPOCHS * len(values), len(values)))
        return len(values) / (time.perf_counter() - began)

    def _train(self, rate: float, epochs: int, **saving: Any) -> float:
        """Train with a learning rate; return the accuracy on the validation rows."""
        import keras

        from distkeras import EarlyStopping, Monitoring, Trainer

        keras.utils.set_random_seed(0)
        layers = [
            keras.Input((INPUTS,)),
            keras.layers.Dense(HIDDEN, activation="relu"),
            keras.layers.Dense(CLASSES, activation="softmax"),
        ]
        trainer = Trainer(
            keras.Sequential(layers),
            "agn",
            worker_optimizer=keras.optimizers.SGD(rate),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
            num_workers=WORKERS,
            batch_size=BATCH,
            num_epoch=epochs,
            monitoring=Monitoring(progress=False),
        )
        evaluation = EarlyStopping(self._validation, "accuracy", every_epochs=epochs)
        trainer.train(self._df, callbacks=[evaluation], **saving)
        return float(evaluation.evaluations[-1]["accuracy"])

    def note(self) -> str:
        """Return the results of the searches, and the epochs and jobs that they took."""
        parts = []
        for name in ("halving", "grid"):
            rates, epochs, jobs = zip(*(found for search, *found in self.found if search == name), strict=True)
            mean = f"{np.mean(epochs):g} epochs, {np.mean(jobs):g} jobs"
            parts.append(f"{name}: best {', '.join(map(str, rates))}; {mean}")
        return "; ".join(parts)
