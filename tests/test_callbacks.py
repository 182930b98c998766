"""Callbacks on a harness that provides centers; tests/training has tests with jobs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest

from distkeras.callbacks import (
    Callback,
    CallbackContext,
    CenterWeights,
    EarlyStopping,
    Pruning,
    TimeBudget,
    TrainingSetup,
)
from distkeras.data.batches import Batch
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps.errors import ConfigurationError, EmptyDataError, LocalProtocolError
from distkeras.ps.protocol.driver_messages import Status
from distkeras.training.callback_runner import begin_callbacks, require_callbacks

STATUS = Status(0, 2, 0, 0, 0, math.nan, math.nan)


@pytest.fixture(scope="module")
def replica() -> KerasReplica:
    """Return a replica with one weight w and no bias; on the only row, 1 with the target 0, the loss is w squared."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile("sgd", "mse", metrics=["mae"])
    return KerasReplica(model)


#: A placeholder for a DataFrame, whose rows `CallbackHarness` provides.
NO_FRAME: Any = None
ROWS = Batch(0, 0, True, x=(np.ones((1, 1), np.float32),), y=(np.zeros((1, 1), np.float32),), weight=None)


class CallbackHarness:
    """A harness that begins a callback and records its requests."""

    def __init__(self, callback: Any, replica: KerasReplica) -> None:
        self.callback, self.replica = callback, replica
        self.stopped: str | None = None
        callback.on_begin(TrainingSetup(("loss", "mae"), lambda: replica, lambda df, most: ROWS))

    def context(self, weight: float, clock: int, epochs: float = 0.0, **options: Any) -> CallbackContext:
        center = CenterWeights(clock, np.array([weight], np.float32), np.empty(0, np.float32))
        status = replace(STATUS, epochs=epochs)
        return CallbackContext(status, 1.5, lambda: center, lambda: self.replica, self.stop, **options)

    def stop(self, reason: str) -> None:
        self.stopped = self.stopped or reason

    def feed(self, *weights: float) -> int | None:
        """Return the number of evaluations after which the callback stopped the job, from 1; None if it did not."""
        for number, weight in enumerate(weights, start=1):
            self.callback.on_center(self.context(weight, number))
            if self.stopped:
                return number
        return None

    def end(self, weight: float, clock: int) -> float | None:
        """Return the weight that the callback restores at the end; None if it keeps the last one."""
        context = self.context(weight, clock, final=True)
        self.callback.on_end(context)
        return None if context.restored is None else float(context.restored.vector[0])


class TestEarlyStopping:
    def test_a_target_stops_the_job(self, replica: KerasReplica) -> None:
        harness = CallbackHarness(EarlyStopping(NO_FRAME, target=0.25), replica)
        assert harness.feed(2.0, 1.0, 0.5, 0.1) == 3
        assert harness.stopped == "loss 0.25 has reached 0.25"
        assert harness.callback.evaluations[0] == {"clock": 1, "seconds": 1.5, "loss": 4.0, "mae": 2.0}

    @pytest.mark.parametrize(
        ("options", "weights", "stops"),
        [
            ({"monitor": "val_mae", "mode": "max", "target": 3.0}, (1.0, 2.9, 3.0), 3),
            *(({"patience": patience}, (2.0, 1.0, 1.5, 0.9, 0.95, 0.9, 0.8), at) for patience, at in ((1, 3), (2, 6))),
            pytest.param({"patience": 3}, (2.0, 1.0, 1.5, 0.9, 0.95, 0.9, 0.8), None, marks=pytest.mark.slow),
            pytest.param(
                {"monitor": "mae", "patience": 2, "min_delta": 0.5}, (2.0, 1.6, 1.5, 1.4), 3, marks=pytest.mark.slow
            ),
            pytest.param(
                {"monitor": "mae", "patience": 2, "min_delta": 0.25},
                (2.0, 1.6, 1.5, 1.25),
                None,
                marks=pytest.mark.slow,
            ),
            # The bits of both NaN differ; otherwise it would be the same center.
            ({"patience": 2}, (math.nan, -math.nan), 2),
            pytest.param({"patience": 2}, (1.0, math.nan, -math.nan), 3, marks=pytest.mark.slow),
            ({"patience": 2, "target": 1.0}, (math.nan, 2.0, math.nan, 1.0), 4),
        ],
    )
    def test_the_job_is_stopped_at_this_evaluation(
        self, replica: KerasReplica, options: dict[str, Any], weights: tuple[float, ...], stops: int | None
    ) -> None:
        assert CallbackHarness(EarlyStopping(NO_FRAME, **options), replica).feed(*weights) == stops

    @pytest.mark.parametrize(
        ("restore", "weights", "last", "restored"),
        [
            (True, (2.0, 0.5, 1.0), 0.75, 0.5),
            (True, (2.0, 0.5), 0.25, None),  # the last center is the best
            (False, (2.0, 0.5), 2.0, None),
        ],
    )
    def test_the_best_center_is_restored_on_request(
        self, replica: KerasReplica, restore: bool, weights: tuple[float, ...], last: float, restored: float | None
    ) -> None:
        harness = CallbackHarness(EarlyStopping(NO_FRAME, restore_best_weights=restore), replica)
        harness.feed(*weights)
        assert harness.end(last, 9) == restored
        best, clock = min((weight**2, clock) for clock, weight in enumerate((*weights, last), 1))
        assert (harness.callback.best, harness.callback.best_clock) == (best, 9 if clock > len(weights) else clock)

    def test_the_reason_names_the_best_value(self, replica: KerasReplica) -> None:
        harness = CallbackHarness(EarlyStopping(NO_FRAME, patience=2), replica)
        harness.feed(2.0, 3.0, -3.0)
        assert harness.stopped == "loss has not become better than 4 in 2 evaluations in a row"

    def test_a_center_is_evaluated_once(self, replica: KerasReplica) -> None:
        harness = CallbackHarness(EarlyStopping(NO_FRAME, patience=1), replica)
        for _ in range(3):
            harness.callback.on_center(harness.context(1.0, 5))
        harness.end(1.0, 5)
        assert len(harness.callback.evaluations) == 1
        assert harness.stopped is None

    def test_an_unchanged_center_does_not_count_against_the_patience(self, replica: KerasReplica) -> None:
        # Within a round, or while a buffer fills, the clock rises and the center does not change.
        harness = CallbackHarness(EarlyStopping(NO_FRAME, patience=2), replica)
        assert harness.feed(3.0, 3.0, 3.0, 3.0, 2.0, 2.0, 2.0, 2.5) is None
        assert [values["clock"] for values in harness.callback.evaluations] == [1, 5, 8]

    def test_a_drained_center_is_evaluated_at_the_end(self, replica: KerasReplica) -> None:
        harness = CallbackHarness(EarlyStopping(NO_FRAME, restore_best_weights=True), replica)
        harness.feed(3.0, 2.0)
        assert harness.end(2.5, 2) == 2.0  # the center has changed without a commit, and is worse
        assert [values["loss"] for values in harness.callback.evaluations] == [9.0, 4.0, 6.25]

    def test_warming_up_does_not_count_as_an_evaluation(self, replica: KerasReplica) -> None:
        harness = CallbackHarness(EarlyStopping(NO_FRAME), replica)
        harness.callback.warm_up(lambda: replica)
        assert harness.callback.evaluations == []
        harness.feed(2.0)
        assert [values["loss"] for values in harness.callback.evaluations] == [4.0]

    def test_a_second_job_starts_without_the_state_of_the_first(self, replica: KerasReplica) -> None:
        callback = EarlyStopping(NO_FRAME, patience=1, restore_best_weights=True)
        CallbackHarness(callback, replica).feed(0.1, 1.0)
        assert CallbackHarness(callback, replica).feed(3.0, 2.0) is None
        assert len(callback.evaluations) == 2

    def test_an_unknown_metric_is_refused(self, replica: KerasReplica) -> None:
        with pytest.raises(ConfigurationError, match=r"one of \['loss', 'mae'\].*'accuracy'"):
            CallbackHarness(EarlyStopping(NO_FRAME, "val_accuracy"), replica)

    @pytest.mark.parametrize(
        ("name", "sign"),
        [("loss", 1), ("accuracy", -1), ("val_sparse_categorical_accuracy", -1), ("mae", 1), ("auc", -1)],
    )
    def test_the_direction_follows_from_the_name_of_the_metric(self, name: str, sign: int) -> None:
        assert EarlyStopping(NO_FRAME, name).sign == sign

    def test_mode_must_be_given_for_an_unknown_name(self) -> None:
        with pytest.raises(ConfigurationError, match="`mode` must be given"):
            EarlyStopping(NO_FRAME, "surprise")
        assert EarlyStopping(NO_FRAME, "surprise", mode="max").sign == -1

    @pytest.mark.parametrize(
        "options",
        [{"patience": 0}, {"max_rows": 0}, {"min_delta": -1.0}, {"mode": "best"}, {"every_commits": 0}]
        + [{"every_seconds": seconds} for seconds in (0, -1.0, math.nan, math.inf, "1", True)],
    )
    def test_invalid_arguments_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=f"`{next(iter(options))}` must be"):
            EarlyStopping(NO_FRAME, **options)


class RecordingTrial:
    """A trial that is pruned if its loss is above 3."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, float]] = []

    def report(self, value: float, step: int) -> None:
        self.reports.append((step, value))

    def should_prune(self) -> bool:
        return self.reports[-1][1] > 3.0


class TestPruning:
    def test_each_completed_interval_is_reported_once(self, replica: KerasReplica) -> None:
        pruning = Pruning(trial := RecordingTrial(), NO_FRAME, every_epochs=0.5)
        harness = CallbackHarness(pruning, replica)
        for clock, epochs in enumerate((0.4, 0.6, 0.9, 1.7, 1.9), start=1):
            pruning.on_center(harness.context(clock / 4, clock, epochs))
        assert trial.reports == [(1, 0.25), (3, 1.0)]
        pruning.on_end(harness.context(1.5, 6, 2.0, final=True))
        assert trial.reports[2:] == [(4, 2.25)]
        assert len(pruning.evaluations) == 6
        assert (pruning.pruned, harness.stopped) == (False, None)

    def test_the_end_is_reported_without_a_second_evaluation(self, replica: KerasReplica) -> None:
        pruning = Pruning(trial := RecordingTrial(), NO_FRAME)
        harness = CallbackHarness(pruning, replica)
        pruning.on_center(harness.context(1.0, 4, 1.9))
        pruning.on_end(harness.context(1.0, 4, 2.0, final=True))
        assert trial.reports == [(1, 1.0), (2, 1.0)]
        assert len(pruning.evaluations) == 1

    def test_a_pruned_trial_ends_the_job_and_receives_no_further_reports(self, replica: KerasReplica) -> None:
        pruning = Pruning(trial := RecordingTrial(), NO_FRAME)
        harness = CallbackHarness(pruning, replica)
        pruning.on_center(harness.context(2.0, 1, 1.0))
        assert (pruning.pruned, harness.stopped) == (True, "the search has pruned the trial at step 1, with loss 4")
        pruning.on_end(harness.context(1.0, 2, 2.0, final=True))
        assert trial.reports == [(1, 4.0)]
        assert pruning.pruned
        assert CallbackHarness(pruning, replica).feed(1.0) is None
        assert not pruning.pruned

    def test_invalid_arguments_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="`trial` must have the methods `report` and `should_prune`"):
            Pruning(object(), NO_FRAME)  # type: ignore[arg-type]  # the test passes a wrong type
        with pytest.raises(ConfigurationError, match="`every_epochs` must be"):
            Pruning(RecordingTrial(), NO_FRAME, every_epochs=0)


def test_a_time_budget_is_due_once_and_stops(replica: KerasReplica) -> None:
    budget = TimeBudget(2.5)
    assert (budget.every_seconds, budget.every_commits) == (2.5, None)
    harness = CallbackHarness(budget, replica)
    assert harness.feed(1.0) == 1
    assert harness.stopped == "the time budget of 2.5 s is spent"
    with pytest.raises(ConfigurationError, match="`seconds` must be"):
        TimeBudget(0)


def test_weights_are_restored_at_the_end_only(replica: KerasReplica) -> None:
    harness = CallbackHarness(Callback(), replica)
    context = harness.context(1.0, 1)
    with pytest.raises(LocalProtocolError, match="on_end"):
        context.restore(context.center)


def test_the_model_has_the_centers_weights(replica: KerasReplica) -> None:
    context = CallbackHarness(Callback(), replica).context(1.25, 7)
    assert context.clock == 0  # the clock of the status
    assert context.model.get_weights()[0].item() == 1.25
    assert context.clock == 7


def test_the_interval_is_set_by_the_constructor() -> None:
    assert (Callback().every_commits, Callback().every_seconds) == (None, 10.0)
    assert (Callback(every_commits=5).every_commits, Callback(every_commits=5).every_seconds) == (5, None)


def test_the_interval_is_set_by_the_class() -> None:
    class Often(Callback):
        every_commits = 3

    class Wrong(Callback):
        every_commits = 0

    class WithoutBaseInit(Callback):
        every_seconds = 2.0

        def __init__(self) -> None:
            """Do not call the base class."""

    class WithoutInterval(Callback):
        def __init__(self) -> None:
            """Do not call the base class."""

    assert (Often().every_commits, Often().every_seconds) == (3, None)
    seldom = Often(every_seconds=5)
    assert seldom.every_commits is None
    assert seldom.every_seconds == 5
    with pytest.raises(ConfigurationError, match="`every_commits` must be"):
        Wrong()
    own, unsaid = require_callbacks([WithoutBaseInit(), WithoutInterval()])
    assert (own.every_commits, own.every_seconds) == (None, 2.0)
    assert (unsaid.every_commits, unsaid.every_seconds) == (None, 10.0)


class Ending(Callback):
    """A callback that records the errors of jobs."""

    def __init__(self, on_begin: Exception | None = None, on_failure: Exception | None = None) -> None:
        super().__init__()
        self.raised, self.raises = on_begin, on_failure
        self.failures: list[BaseException] = []

    def on_begin(self, setup: TrainingSetup) -> None:
        if self.raised is not None:
            raise self.raised

    def on_failure(self, error: BaseException) -> None:
        self.failures.append(error)
        if self.raises is not None:
            raise self.raises


def test_callbacks_that_had_begun_are_notified_if_a_later_one_fails_to_begin(caplog: pytest.LogCaptureFixture) -> None:
    error = EmptyDataError("nothing there")
    first, second = Ending(on_failure=OSError("no disk")), Ending()
    third, fourth = Ending(on_begin=error), Ending()
    setup = TrainingSetup(("loss",), lambda: None, lambda df, most: None)  # type: ignore[arg-type, return-value]  # the callbacks do not use these
    with pytest.raises(EmptyDataError, match="nothing there"):
        begin_callbacks([first, second, third, fourth], setup)
    assert [callback.failures for callback in (first, second, third, fourth)] == [[error], [error], [error], []]
    assert "Ending.on_failure raised an error, after the job had failed" in caplog.text


def test_an_object_that_is_not_a_callback_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="`callbacks` must be"):
        require_callbacks([lambda context: None])
