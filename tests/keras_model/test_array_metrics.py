"""Metrics of one number for each class: a worker's steps report what Keras' own report, number by number."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from distkeras.data.batches import Batch
from distkeras.groups.replica import STACKS
from distkeras.keras_model.replica import KerasReplica
from distkeras.metric_columns import with_arrays
from distkeras.ps.errors import ConfigurationError

DRAW = np.random.default_rng(3)
X = DRAW.normal(size=(12, 4)).astype(np.float32)
Y = np.eye(3, dtype=np.float32)[DRAW.integers(0, 3, 12)]


def classifier(*metrics: Any) -> keras.Model:
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, "softmax")])
    model.compile("adam", "categorical_crossentropy", metrics=["accuracy", keras.metrics.F1Score(), *metrics])
    return model


def batches() -> list[Batch]:
    return [Batch(0, n, n == 2, (X[4 * n : 4 * n + 4],), (Y[4 * n : 4 * n + 4],), None) for n in range(3)]


def of_keras(model: keras.Model) -> list[dict[str, Any]]:
    logs = []
    for batch in batches():
        model.reset_metrics()
        logs.append(model.train_on_batch(batch.x[0], batch.y[0], return_dict=True))
    return logs


@pytest.mark.parametrize("eager", [pytest.param(False, marks=pytest.mark.slow), True])
def test_steps_report_each_number(eager: bool) -> None:
    model = classifier()
    model.run_eagerly = eager
    replica = KerasReplica(model)
    rows = replica.train(batches())
    assert replica.metric_names == ("loss", "accuracy", "f1_score[0]", "f1_score[1]", "f1_score[2]")
    for row, expected in zip(rows, of_keras(classifier()), strict=True):
        found = with_arrays(dict(zip(replica.metric_names, row, strict=True)))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_evaluations_report_each_number() -> None:
    model = classifier()
    expected = model.evaluate(X, Y, batch_size=5, verbose=0, return_dict=True)
    found = KerasReplica(classifier()).evaluate(Batch(0, 0, True, (X,), (Y,), None), 5)
    assert with_arrays(found).keys() == expected.keys()
    for name, value in with_arrays(found).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() == "torch", reason="it has no stacks of models")
def test_models_side_by_side_report_each_number() -> None:
    replica = KerasReplica(classifier())
    replica.prepare(batches()[0])
    replica.model.optimizer.build(replica.model.trainable_variables)
    width = len(replica.metric_names)
    stacked = STACKS[keras.backend.backend()](replica.model, batches()[0], replica.reported, width, 2)
    x, y = (np.stack([[one, one] for one in side]) for side in zip(*((b.x[0], b.y[0]) for b in batches()), strict=True))
    rows = stacked.train(np.arange(2, dtype=np.int32), [x, y])
    logs = of_keras(classifier())
    expected = [np.concatenate([np.ravel(one[name]) for name in replica.reported]) for one in logs]
    assert rows.shape == (3, 2, width)
    np.testing.assert_allclose(rows[:, 0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rows[:, 1], expected, rtol=1e-5, atol=1e-6)


class Confusion(keras.metrics.MeanIoU):
    """Reports a matrix."""

    def result(self) -> Any:
        return self.total_cm


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")  # Keras casts to int64, also on JAX
def test_a_metric_of_several_axes_is_refused_by_name() -> None:
    replica = KerasReplica(classifier(Confusion(3, name="matrix", sparse_y_true=False, sparse_y_pred=False)))
    with pytest.raises(ConfigurationError, match=r"arrays of one axis.*Received: 'matrix' of shape \(3, 3\)"):
        replica.prepare(batches()[0])


def test_a_name_of_several_lines_is_refused() -> None:
    replica = KerasReplica(classifier(keras.metrics.AUC(name="a\nb")))
    with pytest.raises(ConfigurationError, match=r"one line\. Received: 'a\\nb'"):
        replica.prepare(batches()[0])
