"""Callbacks of a stream: they live as long as the stream, may stop it, and end it with their errors."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import pytest
from pyspark.sql import SparkSession
from support.patience import patience, until
from support.present import present
from support.prometheus import numbers
from support.training.small_jobs import counter
from support.training.spark_jobs import counting_rows, counts
from support.training.streams import arrive, arriving

from distkeras import Dashboard, EarlyStopping, KerasCallbacks, PrometheusMetrics, Pruning
from distkeras.callbacks import Callback, CallbackContext, TrainingSetup
from distkeras.dashboard.watch import read_since
from distkeras.ps.errors import ConfigurationError, DistkerasError, LocalProtocolError
from distkeras.results import JobResults, MicroBatchProgress, backlog_of
from distkeras.training.stream import StreamTraining

pytestmark = pytest.mark.usefixtures("nothing_left")

#: Rows of a micro-batch, and rows in total.
EACH, ROWS = 12, 24


class Hooks(Callback):
    """A callback that records its calls, in order."""

    def __init__(self, **every: Any) -> None:
        super().__init__(**every)
        self.calls: list[tuple[str, Any]] = []

    def on_begin(self, setup: TrainingSetup) -> None:
        self.calls.append(("begin", setup.metrics))

    def on_center(self, context: CallbackContext) -> None:
        self.calls.append(("center", context.center.clock))

    def on_end(self, context: CallbackContext) -> None:
        self.calls.append(("end", context.center.clock))

    def on_success(self, results: JobResults) -> None:
        self.calls.append(("success", results))

    def on_failure(self, error: BaseException) -> None:
        self.calls.append(("failure", error))


class RecordsMicroBatches(Callback):
    """A callback that records the latest micro-batch at each call."""

    def __init__(self) -> None:
        super().__init__(every_seconds=0.05)
        self.seen: list[MicroBatchProgress] = []

    def on_center(self, context: CallbackContext) -> None:
        if context.micro_batch is not None:
            self.seen.append(context.micro_batch)

    on_end = on_center


class Raises(Hooks):
    """A callback that raises in its first call with a center."""

    def on_center(self, context: CallbackContext) -> None:
        raise ArithmeticError("of the callback")


class CallsItsStream(Callback):
    """A callback that calls everything that its stream's handle has, at each kind of call, and records the outcomes."""

    def __init__(self) -> None:
        super().__init__(every_seconds=0.05)
        self.training: StreamTraining | None = None
        self.found: dict[str, dict[str, Any]] = {}

    def on_center(self, context: CallbackContext) -> None:
        if self.training is not None and context.micro_batch is not None:
            self.call_everything("on_center")

    def on_end(self, context: CallbackContext) -> None:
        self.call_everything("on_end")

    def on_success(self, results: JobResults) -> None:
        self.call_everything("on_success")

    def call_everything(self, hook: str) -> None:
        arguments: dict[str, tuple[Any, ...]] = {"start": (None, ""), "remove_rows": ("table", [1])}
        found = self.found[hook] = {}
        names = [name for name in dir(StreamTraining) if not name.startswith("_") and name not in ("stop", "convert")]
        for name in (*names, "stop"):
            try:
                value = getattr(self.training, name)
                found[name] = value(*arguments.get(name, ())) if callable(value) else value
            except DistkerasError as error:
                found[name] = type(error)


def ends(training: StreamTraining) -> bool:
    return training.awaitTermination(patience(120)) and not training.isActive


def shown_by(dashboard: Dashboard) -> dict[str, Any]:
    """Return the latest record of a page."""
    return dict(json.loads(read_since(dashboard.watches[0].path)[-1].data))


def assert_all_report_the_same(
    latest: MicroBatchProgress, records: RecordsMicroBatches, metrics: PrometheusMetrics, dashboard: Dashboard, log: str
) -> None:
    assert latest.batch == 1
    assert latest.lag is not None
    assert records.seen[-1] == latest
    found = numbers(metrics)
    names = ("micro_batch", "micro_batch_rows", "micro_batch_seconds", "lag_seconds")
    assert [found[f"distkeras_{name}"] for name in names] == [1, EACH, latest.seconds, latest.lag]
    page = shown_by(dashboard)
    assert page["now"]["micro_batch"] == asdict(latest) | {"loss": pytest.approx(latest.loss, rel=1e-3)}
    assert page["facts"]["stream"]
    assert (page["now"]["state"], page["now"]["samples"]) == ("stopped", ROWS)
    assert f"{latest}" in log
    assert f"at most {latest.lag:.1f} s behind" in log


def test_the_backlog_is_read_from_the_metrics_of_the_sources() -> None:
    offsets = {"avgOffsetsBehindLatest": "4.0", "maxOffsetsBehindLatest": "7", "minOffsetsBehindLatest": "1"}
    sources = [{"metrics": offsets}, {"metrics": {"maxOffsetsBehindLatest": "5", "numFilesOutstanding": "2"}}, {}]
    assert backlog_of(sources) == {"maxOffsetsBehindLatest": 7.0, "numFilesOutstanding": 2.0}
    assert backlog_of([{"metrics": None}]) == {}


@pytest.mark.slow
def test_callbacks_live_as_long_as_the_stream_and_stop_it(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arrive(tmp_path / "in", 0, range(EACH), ROWS)
    stopping = EarlyStopping(counting_rows(spark, ROWS), target=0.5 - ROWS, every_commits=1)
    hooks, observer, trainer = Hooks(every_commits=1), Hooks(every_seconds=0.05), counter(rows=ROWS, num_epoch=1)
    trainer.observers.append(observer)
    records, metrics, dashboard = RecordsMicroBatches(), PrometheusMetrics(), Dashboard()
    callbacks = [hooks, stopping, records, metrics, dashboard]
    stream = arriving(spark, tmp_path / "in")
    with closing(metrics), dashboard, caplog.at_level("INFO", "distkeras.training.stream"):
        training = trainer.train_stream(stream, checkpoint=tmp_path / "checkpoint", callbacks=callbacks)
        until(lambda: shown_by(dashboard)["now"]["samples"] == EACH)  # a page looks once a second
        arrive(tmp_path / "in", 1, range(EACH, ROWS), ROWS)
        assert ends(training)  # without the callback the stream would wait for more files
        assert training.callbacks == [*callbacks, observer]
        assert_all_report_the_same(present(training.lastProgress), records, metrics, dashboard, caplog.text)
    assert counts(training.model()) == [1.0] * ROWS
    clock = present(training.lastProgress).clock
    assert stopping.evaluations[-1]["clock"] == clock  # of both micro-batches
    assert present(trainer.stopped).startswith("loss -24 has reached")
    for calls in (hooks.calls, observer.calls):
        assert [name for name, _ in calls if name != "center"] == ["begin", "end", "success"]
        assert calls[-2:] == [("end", clock), ("success", trainer)]
        clocks = [of for name, of in calls if name == "center"]
        assert clocks == sorted(clocks)
        assert clocks[-1] <= clock


@pytest.mark.slow
def test_a_callback_may_call_every_method_of_its_stream(spark: SparkSession, tmp_path: Path) -> None:
    arrive(tmp_path / "in", 0, range(EACH), ROWS)
    calls, trainer = CallsItsStream(), counter(rows=ROWS, num_epoch=1)
    stream = arriving(spark, tmp_path / "in")
    training = calls.training = trainer.train_stream(stream, checkpoint=tmp_path / "checkpoint", callbacks=[calls])
    assert ends(training)
    assert list(calls.found) == ["on_center", "on_end", "on_success"]
    for found in calls.found.values():
        assert found["start"] is found["awaitTermination"] is LocalProtocolError
        assert found["remove_rows"] is ConfigurationError  # the model has no such table
        assert (found["isActive"], found["exception"], found["stop"]) == (True, None, None)
        assert found["callbacks"] == [calls]
        assert counts(found["model"]) == [1.0] * EACH + [0.0] * (ROWS - EACH)
    assert trainer.stopped == "a callback has called `stop`"


@pytest.mark.slow
def test_the_error_of_a_callback_ends_the_stream(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    stream = arriving(spark, tmp_path / "in")
    for name, options in (("idle", {"every_seconds": 0.001}), ("endless", {"every_commits": 1})):
        raises, trainer = Raises(**options), counter(rows=ROWS, num_epoch=1_000_000)
        training = trainer.train_stream(stream, checkpoint=tmp_path / name, callbacks=[raises])
        with pytest.raises(ArithmeticError, match="of the callback"):
            ends(training)
        assert not training.query.isActive
        assert [call for call, _ in raises.calls] == ["begin", "failure"]
        assert raises.calls[-1][1] is training.exception()
        assert trainer.outcome.failure == "ArithmeticError: of the callback"
        arrive(tmp_path / "in", 0, range(EACH), ROWS)  # an endless micro-batch, which is canceled


def test_a_callback_that_counts_epochs_is_refused_before_work(spark: SparkSession, tmp_path: Path) -> None:
    stream, trainer = arriving(spark, tmp_path), counter(rows=ROWS)
    begun, df = Hooks(), counting_rows(spark, ROWS)
    kept = keras.callbacks.LambdaCallback()
    for callback in (EarlyStopping(df, every_epochs=1), Pruning(Trial(), df), KerasCallbacks([kept]), kept):
        with pytest.raises(ConfigurationError, match=r"`callbacks` of a stream must be called by commits or seconds"):
            trainer.train_stream(stream, checkpoint=tmp_path / "checkpoint", callbacks=[begun, callback])
    with pytest.raises(ConfigurationError, match="`monitor` must be one of"):
        trainer.train_stream(stream, checkpoint=tmp_path / "checkpoint", callbacks=[begun, EarlyStopping(df, "f1")])
    assert [name for name, _ in begun.calls] == ["begin", "failure"]
    assert not (tmp_path / "checkpoint").exists()


class Trial:
    """A trial without a search."""

    def report(self, value: float, step: int) -> None:
        raise AssertionError

    def should_prune(self) -> bool:
        raise AssertionError
