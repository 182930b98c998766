"""Callbacks of Keras, which the driver calls."""

from __future__ import annotations

import copy
import csv
import inspect
import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from distkeras import KerasCallbacks
from distkeras.callbacks import CallbackContext, CenterWeights, TimeBudget, TrainingSetup
from distkeras.data.batches import Batch
from distkeras.keras_callbacks import REFUSED, with_keras_callbacks
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.driver_messages import Status
from distkeras.training.callback_runner import require_callbacks

ROWS = Batch(0, 0, True, x=(np.ones((1, 1), np.float32),), y=(np.zeros((1, 1), np.float32),), weight=None)
FRAME: Any = object()  # a placeholder; `Job` provides the rows


@pytest.fixture
def replica() -> KerasReplica:
    """Return a replica with one weight w and no bias; on the only row, 1 with the target 0, the loss is w squared."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile("sgd", "mse", metrics=["mae"])
    return KerasReplica(model)


class Job:
    """A job that passes centers to its callback, each with the number of completed epochs."""

    def __init__(self, callback: KerasCallbacks, replica: KerasReplica) -> None:
        self.callback, self.replica = callback, replica
        self.stopped: str | None = None
        callback.on_begin(TrainingSetup(("loss", "mae"), lambda: replica, lambda df, most: ROWS))

    def pass_center(self, weight: float, clock: int, epochs: float, *, final: bool = False) -> CallbackContext:
        center = CenterWeights(clock, np.array([weight], np.float32), np.empty(0, np.float32))
        status = Status(clock, 2, 0, 0, 0, 0.5, math.nan, epochs)
        context = CallbackContext(status, 1.0, lambda: center, lambda: self.replica, self.stop, final=final)
        (self.callback.on_end if final else self.callback.on_center)(context)
        return context

    def stop(self, reason: str) -> None:
        self.stopped = self.stopped or reason


def calls(**keywords: Any) -> tuple[KerasCallbacks, list[Any]]:
    found: list[Any] = []
    watching = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: found.append((epoch, logs)),
        on_train_begin=lambda logs: found.append("begin"),
        on_train_end=lambda logs: found.append("end"),
    )
    return KerasCallbacks([watching], **keywords), found


class TestEpochs:
    def test_epochs_are_those_of_the_data(self, replica: KerasReplica) -> None:
        callback, found = calls()
        job = Job(callback, replica)
        for clock, epochs in enumerate((0.2, 0.9, 1.0, 1.4, 3.1)):
            job.pass_center(1.0, clock, epochs)
        job.pass_center(1.0, 9, 4.0, final=True)
        assert found == ["begin", (0, {"loss": 0.5}), (2, {"loss": 0.5}), (3, {"loss": 0.5}), "end"]

    def test_an_epoch_may_be_a_number_of_commits(self, replica: KerasReplica) -> None:
        callback, found = calls(every_commits=3)
        job = Job(callback, replica)
        for clock in range(8):
            job.pass_center(1.0, clock, 0.0)
        job.pass_center(1.0, 7, 0.0, final=True)
        assert [entry[0] for entry in found if entry not in ("begin", "end")] == [0, 1, 2]

    def test_no_center_is_passed_on_twice(self, replica: KerasReplica) -> None:
        callback, found = calls()
        job = Job(callback, replica)
        job.pass_center(1.0, 5, 1.0)
        job.pass_center(1.0, 5, 1.0, final=True)
        assert found == ["begin", (0, {"loss": 0.5}), "end"]

    def test_a_drained_center_is_passed_on_at_the_end(self, replica: KerasReplica) -> None:
        callback, found = calls(validation=FRAME)
        job = Job(callback, replica)
        job.pass_center(3.0, 5, 1.0)
        job.pass_center(2.0, 5, 1.0, final=True)  # the center has changed without a commit
        assert [logs["val_mae"] for _, logs in found[1:-1]] == [3.0, 2.0]

    def test_validation_metrics_are_passed_on(self, replica: KerasReplica) -> None:
        callback, found = calls(validation=FRAME)
        Job(callback, replica).pass_center(3.0, 1, 1.0)
        assert found[1][1] == {"loss": 0.5, "val_loss": 9.0, "val_mae": 3.0}

    def test_a_second_job_starts_without_the_state_of_the_first(self, replica: KerasReplica) -> None:
        callback, found = calls()
        for _ in range(2):
            job = Job(callback, replica)
            job.pass_center(1.0, 1, 1.0)
            job.pass_center(1.0, 1, 1.0, final=True)
        assert found == ["begin", (0, {"loss": 0.5}), "end"] * 2


class TestEachKind:
    def test_early_stopping_stops_and_restores(self, replica: KerasReplica) -> None:
        stopping = keras.callbacks.EarlyStopping("val_mae", patience=2, mode="min", restore_best_weights=True)
        job = Job(KerasCallbacks([stopping], FRAME), replica)
        for epoch, weight in enumerate((3.0, 1.0, 2.0), start=1):
            job.pass_center(weight, epoch, epoch)
        assert job.stopped is None
        job.pass_center(2.5, 4, 4)
        assert job.stopped == "a callback of Keras has stopped the training after epoch 4"
        restored = job.pass_center(2.6, 5, 4.5, final=True).restored
        assert restored is not None
        assert restored.vector.tolist() == [1.0]

    def test_the_last_center_is_kept_if_no_weight_is_restored(self, replica: KerasReplica) -> None:
        job = Job(KerasCallbacks([keras.callbacks.EarlyStopping("loss")]), replica)
        assert job.pass_center(2.0, 1, 1.0, final=True).restored is None

    def test_model_checkpoint_saves_the_model(self, replica: KerasReplica, tmp_path: Path) -> None:
        path = str(tmp_path / "{epoch}-{val_loss:.0f}.keras")
        best = keras.callbacks.ModelCheckpoint(path, "val_loss", save_best_only=True)
        job = Job(KerasCallbacks([best], FRAME), replica)
        for epoch, weight in enumerate((3.0, 4.0, 2.0), start=1):
            job.pass_center(weight, epoch, epoch)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["1-9.keras", "3-4.keras"]
        assert keras.saving.load_model(tmp_path / "3-4.keras").get_weights()[0].item() == 2.0

    def test_csv_logger_writes_its_file(self, replica: KerasReplica, tmp_path: Path) -> None:
        job = Job(KerasCallbacks([keras.callbacks.CSVLogger(tmp_path / "log.csv")], FRAME), replica)
        job.pass_center(3.0, 1, 1.0)
        job.pass_center(2.0, 2, 2.0)
        job.pass_center(2.0, 2, 2.0, final=True)
        rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
        assert [(row["epoch"], float(row["val_loss"])) for row in rows] == [("0", 9.0), ("1", 4.0)]

    def test_tensorboard_writes_its_events(self, replica: KerasReplica, tmp_path: Path) -> None:
        if keras.backend.backend() != "tensorflow":
            pytest.skip("Keras' TensorBoard writes with TensorFlow")
        job = Job(KerasCallbacks([keras.callbacks.TensorBoard(tmp_path, write_graph=False)], FRAME), replica)
        job.pass_center(3.0, 1, 1.0)
        job.pass_center(2.0, 2, 2.0)
        job.pass_center(2.0, 2, 2.0, final=True)
        train, validation = (scalars(tmp_path / name) for name in ("train", "validation"))
        assert train["epoch_loss"] == [(0, 0.5), (1, 0.5)]
        assert validation == {"epoch_loss": [(0, 9.0), (1, 4.0)], "epoch_mae": [(0, 3.0), (1, 2.0)]}

    def test_evaluations_are_passed_on(self, replica: KerasReplica) -> None:
        seen: list[Any] = []

        class Watching(keras.callbacks.Callback):
            def on_test_begin(self, logs: Any = None) -> None:
                seen.append("begin")

            def on_test_end(self, logs: Any = None) -> None:
                seen.append(logs)

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                seen.append(epoch)

        Job(KerasCallbacks([Watching()], FRAME), replica).pass_center(3.0, 1, 1.0)
        assert seen == ["begin", {"loss": 9.0, "mae": 3.0}, 0]

    def test_a_custom_callback_may_change_the_weights(self, replica: KerasReplica) -> None:
        class Doubling(keras.callbacks.Callback):
            def on_train_end(self, logs: Any = None) -> None:
                self.model.set_weights([2 * weights for weights in self.model.get_weights()])

        restored = Job(KerasCallbacks([Doubling()]), replica).pass_center(2.0, 1, 1.0, final=True).restored
        assert restored is not None
        assert restored.vector.tolist() == [4.0]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the steps and values of each scalar that TensorBoard finds in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    read = EventAccumulator(str(folder), size_guidance={TENSORS: 0}).Reload()
    kinds = {tag: read.SummaryMetadata(tag).plugin_data.plugin_name for tag in read.Tags()["tensors"]}
    return {
        tag: [(event.step, make_ndarray(event.tensor_proto).item()) for event in read.Tensors(tag)]
        for tag, kind in kinds.items()
        if kind == "scalars"
    }


class OfBatches(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


class OfTestBatches(keras.callbacks.Callback):
    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


class BoardOfBatches(keras.callbacks.TensorBoard):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


class TestRefusals:
    @pytest.mark.parametrize(
        ("callback", "message"),
        [
            (keras.callbacks.TerminateOnNaN(), "max_skipped"),
            (keras.callbacks.BackupAndRestore("folder"), "checkpoint="),
            (keras.callbacks.ModelCheckpoint("m.keras", save_freq=10), "`save_freq`"),
            (keras.callbacks.TensorBoard("logs", update_freq=5), "`update_freq`"),
            (keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None), "on_train_batch_end"),
            (keras.callbacks.TensorBoard("logs", profile_batch=2), "`profile_batch`"),
            (keras.callbacks.TensorBoard("logs", write_steps_per_second=True), "`write_steps_per_second`"),
            (OfBatches(), "on_train_batch_end"),
            (OfTestBatches(), "on_test_batch_end"),
            (BoardOfBatches("logs"), "on_train_batch_end"),
            (keras.callbacks.SwapEMAWeights(), "averages"),
            (keras.callbacks.History(), "history"),
            (keras.callbacks.ProgbarLogger(), "progress=True"),
            (TimeBudget(1.0), "of Keras"),
        ],
    )
    def test_callbacks_for_batches_or_workers_are_refused(self, callback: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            KerasCallbacks([callback])

    def test_every_callback_of_keras_is_supported_or_refused(self) -> None:
        """Every callback of this version of Keras works, as tested here or in `test_keras_changes`, or is refused."""
        working = {"CSVLogger", "EarlyStopping", "LambdaCallback", "ModelCheckpoint", "RemoteMonitor", "TensorBoard"}
        working |= {"LearningRateScheduler", "ReduceLROnPlateau"}
        containers = {"Callback", "CallbackList", "MonitorCallback"}
        own = {name for name in dir(keras.callbacks) if inspect.isclass(getattr(keras.callbacks, name))}
        assert own - containers - working <= set(REFUSED)

    def test_a_metric_that_is_not_measured_cannot_be_monitored(self, replica: KerasReplica) -> None:
        for monitor, validation in (("val_loss", None), ("val_auc", FRAME), ("mae", FRAME)):
            callback = KerasCallbacks([keras.callbacks.EarlyStopping(monitor)], validation)
            with pytest.raises(ConfigurationError, match=f"Received: monitor='{monitor}'"):
                Job(callback, replica)
        Job(KerasCallbacks([keras.callbacks.ModelCheckpoint("m.keras")]), replica)  # this callback has no monitor

    def test_callbacks_of_keras_may_be_in_a_list_with_others(self) -> None:
        budget, stopping = TimeBudget(1.0), keras.callbacks.EarlyStopping("loss")
        ours, theirs = require_callbacks([stopping, budget])
        assert ours is budget
        assert isinstance(theirs, KerasCallbacks)
        assert theirs.keras_callbacks == [stopping]
        assert copy.copy(theirs).keras_callbacks[0] is not stopping


def test_a_callback_of_keras_next_to_keras_callbacks_has_the_same_epochs_and_rows(tmp_path: Path) -> None:
    stopping, written = keras.callbacks.EarlyStopping("val_loss"), keras.callbacks.CSVLogger(str(tmp_path / "log"))
    given = KerasCallbacks([stopping], FRAME, every_commits=3, max_rows=7)
    same, other = with_keras_callbacks([given, written])
    assert same is given
    assert (other.keras_callbacks, other.commits_an_epoch, other.max_rows) == ([written], 3, 7)
    assert other._validation is FRAME  # noqa: SLF001 - it is not public before a job
