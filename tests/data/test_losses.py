"""The meaning of losses, which Keras' own resolution decides."""

from __future__ import annotations

import functools
from typing import Any

import keras
import pytest
from keras import losses

from distkeras.data.losses import LossKind, kind_of


class Focused(losses.SparseCategoricalCrossentropy):
    """A class of a user, with options of its own."""

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name}


class Weighed(losses.BinaryCrossentropy):
    """A class of a user that computes something else."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return 2.0 * super().call(y_true, y_pred)


def binary_crossentropy(y_true: Any, y_pred: Any) -> Any:
    """A user's function with the name of one of Keras'."""
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


@pytest.mark.parametrize(
    ("loss", "units", "expected"),
    [
        ("bce", 1, LossKind("bce", "binary")),
        ("BCE", 1, LossKind("BCE", "binary")),
        ("BinaryCrossentropy", 1, LossKind("BinaryCrossentropy", "binary")),
        ("crossentropy", 1, LossKind("crossentropy", "binary")),
        ("ce", 3, LossKind("ce", "sparse")),
        (losses.sparse_categorical_crossentropy, 3, LossKind("sparse_categorical_crossentropy", "sparse")),
        (
            functools.partial(losses.binary_crossentropy, from_logits=True),
            1,
            LossKind("partial", "binary", from_logits=True),
        ),
        (
            Focused(from_logits=True, ignore_class=-1),
            3,
            LossKind("Focused", "sparse", from_logits=True, ignore_class=-1),
        ),
        (Weighed(from_logits=True), 1, LossKind("Weighed", "binary", by_keras=False, from_logits=True)),
        (losses.SparseCategoricalCrossentropy(axis=1), 3, LossKind("SparseCategoricalCrossentropy", "sparse", axis=1)),
        (losses.CTC(), 3, LossKind("CTC", "ctc")),
        ("mse", 1, LossKind("mse")),
        (None, 1, LossKind()),
        (binary_crossentropy, 1, LossKind("binary_crossentropy", by_keras=False)),
        ("of_nobody", 1, LossKind("of_nobody", by_keras=False)),
    ],
)
def test_a_loss_means_what_keras_resolves_it_to(loss: Any, units: int, expected: LossKind) -> None:
    assert kind_of(loss, (units,)) == expected
