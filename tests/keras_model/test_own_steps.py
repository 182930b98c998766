"""Models with a `train_step` or `test_step` of their own, as in Keras' guide, train and report as in ``fit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from support.training.small_classifier import mini, weights

from distkeras.data.batches import Batch
from distkeras.keras_model.replica import KerasReplica
from distkeras.ml.evaluation import metric_states
from distkeras.ps.errors import ConfigurationError

pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="steps are written for TensorFlow")


class Guide(keras.Model):
    """The guide's first example: two elements, and every metric by its name."""

    def train_step(self, data: Any) -> dict[str, Any]:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        y_pred = self(x, training=False)
        for metric in self.metrics:
            if metric.name != "loss":
                metric.update_state(y, y_pred)
        self._loss_tracker.update_state(self.compute_loss(y=y, y_pred=y_pred))
        return {metric.name: metric.result() for metric in self.metrics}


class OwnTrackers(keras.Model):
    """The guide's second example: a loss and metrics of its own, which `compile` does not know."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.own_loss = keras.metrics.Mean(name="own_loss")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self) -> list[Any]:
        """Return the trackers, which Keras resets."""
        return [self.own_loss, self.mae]

    def train_step(self, data: Any) -> dict[str, Any]:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = keras.ops.mean(keras.ops.square(y - y_pred)) * 0.5
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.own_loss.update_state(loss)
        self.mae.update_state(y, y_pred)
        return {"own_loss": self.own_loss.result(), "mae": self.mae.result()}


class OwnLoss(keras.Model):
    """An override of `compute_loss`, with a tracker of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tracker = keras.metrics.Mean(name="penalty")

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        penalty = keras.ops.mean(keras.ops.square(y_pred))
        self.tracker.update_state(penalty)
        return keras.ops.mean(keras.ops.square(y_pred - y)) + 0.1 * penalty


class Weighted(Guide):
    """Takes two elements or three."""

    def train_step(self, data: Any) -> dict[str, Any]:
        assert len(data) == 3
        return super(Guide, self).train_step(data)


def built(kind: type, *, eager: bool = False, **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    model = kind(inputs, layers.Dense(2)(layers.Dense(3, activation="tanh")(inputs)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), run_eagerly=eager, **({"loss": "mse"} | compiled))
    return model


def data(weighted: bool = False, rows: int = 8, count: int = 4) -> list[Batch]:
    draw = np.random.default_rng(2)
    return [
        mini(
            (draw.normal(size=(rows, 4)).astype("float32"),),
            (draw.normal(size=(rows, 2)).astype("float32"),),
            draw.uniform(0.5, 2, rows).astype("float32") if weighted else None,
        )
        for _ in range(count)
    ]


def fitted(model: keras.Model, batches: list[Batch]) -> list[dict[str, float]]:
    """Train by `fit` on one mini-batch after another, and return what it reports of each."""
    logs = []
    for batch in batches:
        history = model.fit(
            batch.x[0], batch.y[0], len(batch.x[0]), shuffle=False, verbose=0, sample_weight=batch.weight
        )
        logs.append({name: values[0] for name, values in history.history.items()})
    return logs


@pytest.mark.parametrize("eager", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("kind", "compiled", "weighted"),
    [
        (Guide, {}, False),
        pytest.param(OwnTrackers, {"loss": None}, False, marks=pytest.mark.slow),
        pytest.param(OwnLoss, {"metrics": ["mae"]}, False, marks=pytest.mark.slow),
        pytest.param(Weighted, {"weighted_metrics": ["mae"]}, True, marks=pytest.mark.slow),
    ],
)
def test_own_steps_train_and_report_as_fit_does(
    kind: type, compiled: dict[str, Any], weighted: bool, eager: bool
) -> None:
    given, batches = built(kind, eager=eager, **compiled), data(weighted)
    expected = fitted(given, batches)
    replica = KerasReplica(built(kind, eager=eager, **compiled))
    before = weights(replica)
    replica.prepare(batches[0])
    np.testing.assert_array_equal(weights(replica), before)
    rows = replica.train(batches)
    assert set(replica.metric_names) == set(expected[0])
    np.testing.assert_allclose(rows, [[logs[name] for name in replica.metric_names] for logs in expected], rtol=1e-6)
    np.testing.assert_allclose(weights(replica), weights(KerasReplica(given)), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("eager", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_gradient_is_that_of_the_own_step(eager: bool) -> None:
    replica, batch = KerasReplica(built(OwnTrackers, eager=eager, loss=None)), data()[0]
    before, gradient = weights(replica), replica.layout.empty()
    replica.gradient(batch, gradient)
    np.testing.assert_array_equal(weights(replica), before)
    replica.train([batch])
    np.testing.assert_allclose(before - 0.1 * gradient, weights(replica), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("eager", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_own_test_step_is_given_its_data_as_by_evaluate(eager: bool) -> None:
    model, batch = built(Guide, eager=eager, metrics=["mae"]), data(rows=10)[0]
    expected = model.evaluate(batch.x[0], batch.y[0], batch_size=4, verbose=0, return_dict=True)
    assert KerasReplica(model).evaluate(batch, batch_size=4) == pytest.approx(expected, rel=1e-6)
    metric_states(model, batch)
    logs = model.get_metrics_result()
    assert float(logs["mae"]) == pytest.approx(expected["mae"], rel=1e-6)


class Inputs(keras.Model):
    """Notes the containers that its step is given."""

    def train_step(self, data: Any) -> dict[str, Any]:
        self.kinds.append(keras.tree.map_structure(lambda _: None, data))
        return super().train_step(data)


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_data_have_the_containers_of_fit(several: bool) -> None:
    def model() -> keras.Model:
        inputs = [keras.Input((2,)) for _ in range(2 if several else 1)]
        outputs = [layers.Dense(1)(each) for each in inputs]
        made = Inputs(inputs if several else inputs[0], outputs if several else outputs[0])
        made.kinds = []
        made.compile("sgd", "mse")
        return made

    arrays = (np.ones((4, 2), np.float32),) * (2 if several else 1)
    labels = (np.ones((4, 1), np.float32),) * (2 if several else 1)
    given, ours = model(), model()
    given.fit(list(arrays) if several else arrays[0], list(labels) if several else labels[0], verbose=0)
    KerasReplica(ours).train([mini(arrays, labels)])
    assert list(ours.kinds[-1]) == list(given.kinds[-1])


def step_of(answer: Callable[[Any], Any]) -> type:
    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            return answer(data)

    return Own


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda data: {}, "must return a dictionary"),
        (lambda data: 3.0, "must return a dictionary"),
        (lambda data: {"a": data[0]}, r"single numbers, or arrays.*Received: 'a' of shape \("),
        (lambda data: data.missing, "`train_step` of Own must take a mini-batch as `fit` gives it"),
    ],
)
def test_what_a_step_must_return_is_said_before_training(answer: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        KerasReplica(built(step_of(answer))).prepare(data()[0])


def test_a_metric_that_is_missing_in_a_later_step_is_an_error() -> None:
    kind = step_of(lambda data: {"loss": keras.ops.mean(data[0])} | ({"rows": 1.0} if data[0].shape[0] == 4 else {}))
    replica = KerasReplica(built(kind, eager=True))
    replica.train(data(rows=4))
    assert sorted(replica.metric_names) == ["loss", "rows"]
    with pytest.raises(ConfigurationError, match=r"must return every metric\. Received: none of \['rows'\]"):
        replica.train(data(rows=3))
