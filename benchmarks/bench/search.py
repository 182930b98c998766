"""A search over learning rates whose pruner ends the jobs of poor ones early, compared with the whole grid."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
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
#: Rows to train on, and to evaluate on.
ROWS, VALIDATION_ROWS = 50_000, 10_000


def cases(quick: bool) -> list[Factory]:
    """All cases of the section."""
    return [partial(_rates, RATES[1::2] if quick else RATES, ROWS // 10 if quick else ROWS)]


@contextmanager
def _rates(rates: tuple[float, ...], count: int) -> Iterator[Case]:
    if find_spec("optuna") is None:
        yield Case(SECTION, _name(rates), "settings/s", lambda: 1.0, None, missing="optuna")
        return
    with session() as spark, tempfile.TemporaryDirectory(prefix="distkeras-bench-") as folder:
        df, validation = _frames(spark, count, Path(folder))
        search = _Search(df, validation, rates)
        search.run(pruned=True, seed=0)  # warm
        seeds = iter(range(1, 1000))  # of the order of the rates: another one in each turn
        yield Case(
            SECTION,
            _name(rates),
            "settings/s",
            lambda: search.run(pruned=True, seed=next(seeds)),
            None,
            lambda: search.run(pruned=False, seed=0),
            target_naive=2.0,
            turns=3,
            once=True,
            note=search.note,
        )


def _name(rates: tuple[float, ...]) -> str:
    return f"{len(rates)} learning rates, {EPOCHS} epochs, Fashion-MNIST"


def _frames(spark: Any, count: int, folder: Path) -> tuple[DataFrame, DataFrame]:
    """Return rows to train on and to validate on, which Spark keeps."""
    from distkeras.data.datasets import fashion_mnist, write_parquet

    (x, y), _ = fashion_mnist()
    frames = []
    for name, part in (("train", slice(count)), ("validation", slice(ROWS, ROWS + VALIDATION_ROWS))):
        write_parquet(folder / name, x[part], y[part])
        frames.append(spark.read.parquet(str(folder / name)).cache())
        frames[-1].count()
    return frames[0], frames[1]


class _Search:
    """Finds the best of some learning rates, and remembers what each search has found and trained."""

    def __init__(self, df: DataFrame, validation: DataFrame, rates: tuple[float, ...]) -> None:
        self._df, self._validation, self._rates = df, validation, rates
        self._found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}

    def run(self, *, pruned: bool, seed: int) -> float:
        """Search once, in the order that ``seed`` gives; return settings a second."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        pruners = optuna.pruners
        # After each epoch: whether the trial is among the best quarter of those that came so far.
        pruner = pruners.PercentilePruner(25.0, n_startup_trials=1) if pruned else pruners.NopPruner()
        study = optuna.create_study(direction="maximize", pruner=pruner)
        for rate in np.random.default_rng(seed).permutation(self._rates).tolist():
            study.enqueue_trial({"rate": rate})
        began, epochs = time.perf_counter(), 0.0
        for _ in self._rates:
            epochs += self._try(study)
        seconds = time.perf_counter() - began
        self._found[pruned].append((study.best_params["rate"], epochs))
        return len(self._rates) / seconds

    def _try(self, study: Any) -> float:
        """Train the study's next setting; return the epochs that it was trained for."""
        import keras
        from optuna.trial import TrialState

        from distkeras import Monitoring, Pruning, Trainer

        keras.utils.set_random_seed(0)
        layers = [
            keras.Input((INPUTS,)),
            keras.layers.Dense(HIDDEN, activation="relu"),
            keras.layers.Dense(CLASSES, activation="softmax"),
        ]
        trial = study.ask()
        trainer = Trainer(
            keras.Sequential(layers),
            "agn",
            worker_optimizer=keras.optimizers.SGD(trial.suggest_float("rate", 1e-4, 10.0, log=True)),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
            num_workers=WORKERS,
            batch_size=BATCH,
            num_epoch=EPOCHS,
            monitoring=Monitoring(progress=False),
        )
        pruning = Pruning(trial, self._validation, "accuracy")
        trainer.train(self._df, callbacks=[pruning])
        value = pruning.evaluations[-1]["accuracy"]
        study.tell(trial, *((None, TrialState.PRUNED) if pruning.pruned else (value,)))
        return trainer.history.count() * BATCH / self._df.count()

    def note(self) -> str:
        """Return what the searches have found, and the epochs that they have trained."""
        parts = []
        for pruned, name in ((True, "pruned"), (False, "grid")):
            rates = sorted({rate for rate, _ in self._found[pruned]})
            epochs = np.mean([epochs for _, epochs in self._found[pruned]])
            parts.append(f"{name}: best {', '.join(map(str, rates))} after {epochs:.1f} epochs")
        return f"{'; '.join(parts)}; each starts {len(self._rates)} jobs; the grid evaluates each epoch, too"
