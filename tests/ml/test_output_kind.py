"""What a model's outputs are: classes with probabilities or logits, or numbers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from distkeras.ml.model import KerasModel
from distkeras.ps.errors import ConfigurationError
from distkeras.transformers import LossEvaluator

CLASSES = ["class", "logits", "probability"]


class Scaled(keras.losses.CategoricalCrossentropy):
    """A user's subclass of a cross-entropy."""


def own(y_true: Any, y_pred: Any) -> Any:
    """Return a user's cross-entropy, of which Keras knows nothing."""
    return keras.losses.binary_crossentropy(y_true, y_pred, from_logits=True)


def model_of(loss: Any, units: int = 1, **keywords: Any) -> KerasModel:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units, kernel_initializer="ones")])
    model.compile("sgd", loss)
    return KerasModel(model, **keywords)


def forms(model: KerasModel) -> list[str]:
    return [column.form for column in model.output_columns()]


@pytest.mark.parametrize(
    ("loss", "units", "expected"),
    [
        ("bce", 1, CLASSES),
        ("BinaryCrossentropy", 1, CLASSES),
        ("ce", 2, CLASSES),
        (Scaled(), 2, CLASSES),
        ("bce", 2, ["values"]),
        ("mse", 1, ["number"]),
        (own, 1, ["number"]),
    ],
)
def test_the_resolved_loss_decides_and_not_its_name(loss: Any, units: int, expected: list[str]) -> None:
    assert forms(model_of(loss, units)) == expected


def test_output_kind_says_it_for_a_function_of_the_users() -> None:
    row = [0.25, 0.25]
    logits, scores = (model_of(own, output_kind=kind) for kind in ("logits", "probabilities"))
    assert forms(logits) == CLASSES
    np.testing.assert_allclose(logits.predictProbability(row)[1], 1 / (1 + np.exp(-0.5)), rtol=1e-6)
    np.testing.assert_allclose(scores.predictProbability(row), [0.5, 0.5])
    assert forms(model_of("bce", output_kind="numbers")) == ["number"]
    assert logits.setParams(output_kind=None).output_columns()[0].form == "number"


@pytest.mark.parametrize("kind", ["classes", {"output": "class"}, 3])
def test_other_kinds_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="output_kind"):
        model_of("mse", output_kind=kind)


def test_a_kind_of_an_output_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"`output_kind` must be of the outputs .*Received: \['b'\]"):
        model_of("mse", output_kind={"b": "numbers"}).output_columns()


def test_an_evaluator_knows_the_loss_by_every_name_of_keras() -> None:
    names = ("bce", "BinaryCrossentropy", "MSE", "mae")
    assert [LossEvaluator(name).getOrDefault("loss") for name in names] == [
        "binary_crossentropy",
        "binary_crossentropy",
        "mean_squared_error",
        "mae",
    ]
    with pytest.raises(ConfigurationError, match="loss"):
        LossEvaluator("huber")
