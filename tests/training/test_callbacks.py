"""Callbacks, early ends, skipped commits and events, on Spark."""

from __future__ import annotations

import csv
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import optuna
import pytest
from optuna.trial import TrialState
from pyspark.sql import DataFrame, SparkSession
from support.present import present
from support.training.spark_jobs import (
    accuracy,
    assert_no_jobs,
    assert_nothing_left,
    blobs,
    committed,
    counting_model,
    counting_rows,
    counts,
    table,
    wrong_model,
)

from distkeras import EarlyStopping, KerasCallbacks, Pruning, Trainer
from distkeras.callbacks import Callback, CallbackContext
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.errors import NonFiniteError
from distkeras.ps.protocol.driver_messages import Status
from distkeras.ps.rules import make
from distkeras.settings import grouped

pytestmark = pytest.mark.timeout(240)

ROWS, BATCH = 41, 4
SPARSE = "sparse_categorical_crossentropy"
ENDLESS = 1_000_000


@pytest.fixture(autouse=True)
def nothing_left(spark: SparkSession) -> Iterator[None]:
    yield
    assert_nothing_left()
    assert_no_jobs(spark)


def total(y_true: Any, y_pred: Any) -> Any:
    """Return the counting model's loss; a label of 1 makes the loss of its mini-batch NaN."""
    return keras.ops.sum(y_pred) / keras.ops.cast(keras.ops.max(y_true) < 1, y_pred.dtype)


total.__module__ = "__main__"


def counter(
    rule: str = "downpour", *, workers: int = 2, epochs: int = ENDLESS, rate: float = 1.0, **options: Any
) -> Trainer:
    model = counting_model(ROWS)
    sgd = keras.optimizers.SGD(rate)
    return Trainer(
        model,
        make(rule, window=2),
        worker_optimizer=sgd,
        loss=total,
        num_workers=workers,
        batch_size=BATCH,
        num_epoch=epochs,
        **grouped(options),
    )


class StopAtClock(Callback):
    """A callback that ends the job after `clock` commits and keeps its contexts."""

    def __init__(self, clock: float, when: Callable[[], bool] = lambda: True) -> None:
        super().__init__(every_commits=1)
        self.at, self.when = clock, when
        self.seen: list[tuple[int, float, int]] = []
        self.ends: list[tuple[int, bool]] = []
        self.threads: set[threading.Thread] = set()
        self.warm_ups: list[int] = []

    def warm_up(self, replica: Callable[[], KerasReplica]) -> None:
        self.threads.add(threading.current_thread())
        self.warm_ups.append(len(self.seen))

    def on_center(self, context: CallbackContext) -> None:
        self.threads.add(threading.current_thread())
        self.seen.append((context.center.clock, -float(context.center.vector.sum()), context.status.samples))
        assert counts(context.model) == (-context.center.vector).tolist()
        if context.clock >= self.at and self.when():
            context.stop("seen enough")

    def on_end(self, context: CallbackContext) -> None:
        self.ends.append((context.clock, context.final))


def assert_prefixes(trainer: Trainer) -> None:
    """Assert that each worker committed a prefix of its mini-batches, each exactly once."""
    epochs: dict[int, int] = {}
    for (worker, epoch), batches in sorted(committed(trainer).items()):
        assert batches == list(range(len(batches)))
        assert epoch == epochs.get(worker, 0)
        epochs[worker] = epoch + 1


def test_a_callback_sees_the_center_and_ends_the_job(spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    # There are two slots, so the third worker begins after the job was ended.
    trainer = counter(workers=3, stall_after=1e-3)
    stalled = StopAtClock(40, lambda: "has been silent for" in caplog.text)
    model = trainer.train(counting_rows(spark, ROWS), callbacks=[stalled])
    assert trainer.stopped == "seen enough"
    history, ledger = trainer.history.toPandas(), trainer.ledger.toPandas()
    # The model contains the committed mini-batches and nothing else.
    assert sum(counts(model)) == history.samples.sum() > 0
    assert_prefixes(trainer)
    assert ledger.applied.all()
    assert len(ledger) == stalled.ends[0][0]
    assert stalled.ends == [(len(ledger), True)]
    clocks = [clock for clock, _, _ in stalled.seen]
    assert clocks == sorted(clocks)
    assert clocks[-1] >= 40
    assert all(samples <= summed for clock, summed, samples in stalled.seen)
    assert stalled.warm_ups == [0]
    (thread,) = stalled.threads
    assert thread is not threading.current_thread()
    assert ledger.groupby("worker").attempt.nunique().max() == 1  # no task failed
    events = trainer.events.toPandas()
    assert set(events.kind) == {"stall", "stop"}
    (stop,) = events[events.kind == "stop"].text
    assert stop == "the job ends early: seen enough"


@pytest.mark.slow
def test_a_round_does_not_block_an_early_end_and_the_job_can_be_resumed(spark: SparkSession, tmp_path: Path) -> None:
    df = counting_rows(spark, ROWS)
    first = counter("averaging")
    first.train(df, callbacks=[StopAtClock(6)], checkpoint=tmp_path)
    assert first.stopped == "seen enough"
    assert_prefixes(first)
    later = counter("averaging")
    later.train(df, callbacks=[StopAtClock(len(first.ledger.collect()) + 10)], checkpoint=tmp_path, resume=True)
    assert present(later.resumed).exact
    assert_prefixes(later)
    assert later.ledger.count() >= first.ledger.count() + 10


@pytest.mark.slow
def test_early_stopping_restores_the_best_center(spark: SparkSession) -> None:
    x, y = blobs(seed=1)
    trainer = Trainer(
        wrong_model(),
        make("downpour", window=2),
        worker_optimizer=keras.optimizers.SGD(0.01),
        loss=SPARSE,
        metrics=["accuracy"],
        num_workers=2,
        num_epoch=ENDLESS,
    )
    stopping = EarlyStopping(
        table(spark, x, y), "accuracy", target=0.95, restore_best_weights=True, every_commits=1, max_rows=200
    )
    trained = trainer.train(table(spark, *blobs()), callbacks=[stopping])
    assert present(trainer.stopped).startswith("accuracy ")
    assert [values["accuracy"] for values in stopping.evaluations if values["accuracy"] >= 0.95]
    clocks = [values["clock"] for values in stopping.evaluations]
    assert clocks == sorted(set(clocks))
    assert stopping.best == max(values["accuracy"] for values in stopping.evaluations)
    assert accuracy(trained, x, y) >= 0.9  # over all rows; the callback evaluated 200 of them
    rows = present(stopping.validation_batch)
    assert trained.evaluate(rows.x[0], rows.y[0], verbose=0, return_dict=True)["accuracy"] == pytest.approx(
        stopping.best
    )


@pytest.mark.slow
def test_a_pruned_trial_ends_its_job(spark: SparkSession) -> None:
    """The first trial's loss falls a million times as fast; without pruning the second trial would not end."""
    study = optuna.create_study(pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=4))
    df = counting_rows(spark, ROWS).cache()
    trials = []
    for rate, epochs in ((1e6, 2), (1.0, ENDLESS)):
        trainer, trial = counter(rate=rate, epochs=epochs), study.ask()
        pruning = Pruning(trial, df)
        model = trainer.train(df, callbacks=[pruning])
        assert sum(counts(model)) == rate * trainer.history.toPandas().samples.sum()
        assert_prefixes(trainer)
        study.tell(trial, None if pruning.pruned else pruning.best, TrialState.PRUNED if pruning.pruned else None)
        trials.append((pruning.pruned, trainer.stopped))
    df.unpersist()
    (complete, none), (pruned, reason) = trials
    assert (complete, none, pruned) == (False, None, True)
    assert present(reason).startswith("the search has pruned the trial at step ")
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE, TrialState.PRUNED]
    assert study.best_trial.number == 0


class RecordsEnd(Callback):
    """A callback that keeps the arguments of its calls at the end of a job."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[Any] = []
        self.last: list[Status] = []

    def on_end(self, context: CallbackContext) -> None:
        self.last.append(context.status)

    def on_success(self, results: Any) -> None:
        self.received.append((results.model, results.history.count(), set(results.timings)))

    def on_failure(self, error: BaseException) -> None:
        self.received.append(error)


@pytest.mark.slow
def test_callbacks_of_keras_work_in_a_spark_job(spark: SparkSession, tmp_path: Path) -> None:
    seen: list[Any] = []
    theirs = [
        keras.callbacks.EarlyStopping("val_loss", patience=100, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras")),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: seen.append("begin"),
            on_epoch_end=lambda epoch, logs: seen.append((epoch, logs)),
            on_train_end=lambda logs: seen.append("end"),
        ),
    ]
    if keras.backend.backend() == "tensorflow":
        theirs.append(keras.callbacks.TensorBoard(tmp_path / "board"))
    x, y = blobs(seed=1)
    trainer = Trainer(
        wrong_model(),
        make("downpour", window=2),
        worker_optimizer=keras.optimizers.SGD(0.01),
        loss=SPARSE,
        metrics=["accuracy"],
        num_workers=2,
        num_epoch=3,
    )
    ending = RecordsEnd()
    trained = trainer.train(table(spark, *blobs()), callbacks=[KerasCallbacks(theirs, table(spark, x, y)), ending])
    assert (seen[0], seen[-1]) == ("begin", "end")
    epochs = [epoch for epoch, _ in seen[1:-1]]
    assert epochs == sorted(set(epochs))
    assert epochs[-1] == 2
    best = min((logs["val_loss"], epoch) for epoch, logs in seen[1:-1])[1]
    saved = keras.saving.load_model(tmp_path / f"{best + 1}.keras")
    for weights, others in zip(trained.get_weights(), saved.get_weights(), strict=True):
        np.testing.assert_array_equal(weights, others)  # `EarlyStopping` restored these weights
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == epochs
    assert [float(row["val_accuracy"]) for row in rows] == pytest.approx(
        [logs["val_accuracy"] for _, logs in seen[1:-1]]
    )
    assert keras.backend.backend() != "tensorflow" or list((tmp_path / "board" / "validation").iterdir())
    ((model, steps, timings),) = ending.received
    assert model is trained
    assert steps == trainer.history.count()
    assert timings == {"start", "spark", "finish", "total"}


class StopAtRates(Callback):
    """Ends the job once commits have had a number of learning rates."""

    def __init__(self, rates: int) -> None:
        super().__init__(every_commits=1)
        self.rates = rates

    def on_center(self, context: CallbackContext) -> None:
        assert context.link is not None
        commits = context.link.drain(0, 1_000_000).commits.view(COMMIT)
        if len(set(commits["learning_rate"].tolist())) >= self.rates:
            context.stop("rates enough")


@pytest.mark.slow
def test_workers_train_with_the_rates_that_a_callback_sets(spark: SparkSession) -> None:
    """The steps are those of Keras with each commit's rate; the first epoch's rate is set before its first step."""
    x, y = blobs(64)
    trainer = Trainer(
        wrong_model(),
        make("downpour", window=2),
        worker_optimizer=keras.optimizers.SGD(0.5),
        loss=SPARSE,
        num_workers=1,
        batch_size=64,
        num_epoch=ENDLESS,
    )
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.4 / (epoch + 1))
    trained = trainer.train(table(spark, x, y).coalesce(1), callbacks=[scheduler, StopAtRates(3)])
    commits = trainer.commits.orderBy("clock").collect()
    rates = list(dict.fromkeys(commit["learning_rate"] for commit in commits))
    assert rates[0] == pytest.approx(0.4)
    assert rates == sorted(rates, reverse=True)
    model = wrong_model()
    model.compile(keras.optimizers.SGD(0.5), SPARSE)
    for commit in commits:
        model.optimizer.learning_rate = commit["learning_rate"]
        model.train_on_batch(x, y)
    for mine, theirs in zip(trained.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert float(trained.optimizer.learning_rate) <= rates[-1]
    texts = [event["text"] for event in trainer.events.collect() if event["kind"] == "values"]
    assert "LearningRateScheduler.on_epoch_begin has set the learning rate (0.4) from commit 0 on" in texts[0]


@pytest.mark.slow
def test_on_end_sees_the_last_commits(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distkeras.training.run._STATUS_SECONDS", 1000.0)  # no status after the first one
    trainer = Trainer(
        wrong_model(),
        make("downpour", window=2),
        worker_optimizer=keras.optimizers.SGD(0.01),
        loss=SPARSE,
        num_workers=2,
        num_epoch=2,
    )
    ending = RecordsEnd()
    trainer.train(table(spark, *blobs()), callbacks=[ending])
    (last,) = ending.last
    assert (last.clock, last.epochs, last.finished) == (trainer.commits.count(), 2, 2)


class TestErrors:
    @pytest.mark.slow
    def test_a_callback_that_raises_ends_the_job_with_its_error(self, spark: SparkSession) -> None:
        class Failing(Callback):
            def on_center(self, context: CallbackContext) -> None:
                raise ZeroDivisionError("my own mistake")

        trainer = counter()
        ending = RecordsEnd()
        with pytest.raises(ZeroDivisionError, match="my own mistake") as caught:
            trainer.train(counting_rows(spark, ROWS), callbacks=[Failing(every_commits=3), ending])
        assert ending.received == [caught.value]
        assert trainer.stopped is None
        assert sum(counts(trainer.model)) == trainer.history.toPandas().samples.sum()


class TestBadNumbers:
    @pytest.fixture(scope="class")
    @classmethod
    def rows(cls, spark: SparkSession) -> DataFrame:
        """Return one-hot rows; the label of the first row makes the loss of its mini-batch NaN."""
        return table(spark, np.eye(ROWS, dtype=np.float32), np.eye(ROWS)[0])

    def test_commits_with_nan_are_skipped(self, rows: DataFrame) -> None:
        trainer = counter(epochs=3, max_skipped=100)
        model = trainer.train(rows)
        ledger, history = trainer.ledger.toPandas(), trainer.history.toPandas()
        skipped = ledger[~ledger.applied]
        assert sorted(skipped.epoch) == [0, 1, 2]
        assert skipped.worker.nunique() == 1
        assert history.samples.sum() == 3 * ROWS
        lost = (history.loss.isna() | np.isinf(history.loss)).sum()
        assert 3 <= lost <= 6  # the mini-batch with NaN, and the rest of its window
        steps = (skipped.last_batch - skipped.first_batch + 1).sum()
        # Exactly the rows of the skipped windows are not counted.
        assert 3 * ROWS - steps * BATCH <= sum(counts(model)) < 3 * ROWS
        assert counts(model)[0] == 0
        assert trainer.commits.count() == ledger.applied.sum()
        events = trainer.events.toPandas()
        assert list(events.kind) == ["skipped"] * 3
        assert list(events.worker) == list(skipped.sort_values("clock").worker)
        assert "(1 of at most 100)" in events.text[0]

    @pytest.mark.slow
    def test_the_error_for_too_many_skipped_commits_names_the_layer(self, rows: DataFrame) -> None:
        with pytest.raises(NonFiniteError, match=r"in dense\w*/kernel \(element \d+\).*after 1 commits") as caught:
            counter(epochs=3, max_skipped=1).train(rows)
        assert caught.value.worker in (0, 1)
        assert caught.value.step is not None
