"""Tests of the facts about a job that its page shows in the headline: the monitored metric and the columns."""

from __future__ import annotations

import keras
import pytest

from distkeras.callbacks import Callback, TimeBudget, monitored_metric
from distkeras.data.batches import DataSpec
from distkeras.data.columns import Column, Part
from distkeras.keras_callbacks import KerasCallbacks


class Monitoring(Callback):
    """A callback of a user that has an attribute ``monitor``."""

    def __init__(self, monitor: object) -> None:
        super().__init__()
        self.monitor = monitor


@pytest.mark.parametrize(
    ("monitors", "metric"),
    [([], ""), (["accuracy", "loss"], "accuracy"), (["val_loss"], "loss"), ([None, 3, "", "auc"], "auc")],
)
def test_the_first_monitor_counts(monitors: list[object], metric: str) -> None:
    assert monitored_metric([TimeBudget(1.0), *map(Monitoring, monitors)]) == metric


def test_a_callback_of_keras_monitors_too() -> None:
    callbacks = [keras.callbacks.CSVLogger("log.csv"), keras.callbacks.EarlyStopping("val_accuracy")]
    assert monitored_metric([KerasCallbacks(callbacks)]) == "accuracy"
    assert monitored_metric([KerasCallbacks(callbacks[:1])]) == ""


def test_the_columns_are_those_of_the_dataframe() -> None:
    assembled = Column("features", (2,), parts=(Part("age", "float"), Part("income", "float")))
    spec = DataSpec((assembled, Column("age", ())), (Column("label", (), "int64"),))
    assert spec.names == ("age", "income", "label")
