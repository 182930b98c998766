from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distkeras.data.batches import DataSpec
from distkeras.data.columns import Column
from distkeras.ps.errors import ConfigurationError

X, Y, Z = Column("x", (2,)), Column("y", (), "int64"), Column("z", (), "int64")


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"features": ()}, "features"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": True}, "epochs"),
        ({"seed": -1}, "seed"),
        ({"spool_bytes": -1}, "spool_bytes"),
    ],
)
def test_the_error_for_an_invalid_argument_names_it(arguments: dict[str, Any], argument: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^`{argument}` must .* Received: "):
        DataSpec(**{"features": (X,), "labels": (Y,), **arguments})


def test_a_column_used_twice_is_read_once() -> None:
    assert DataSpec(features=(X, Z), labels=(X, Y), sample_weight=Z).columns == (X, Z, Y)


def test_a_column_that_is_feature_and_label_is_checked_as_a_label() -> None:
    label = replace(Z, classes=3, loss="sparse_categorical_crossentropy")
    (column,) = DataSpec(features=(Z,), labels=(label,)).columns
    assert (column.classes, column.loss) == (3, "sparse_categorical_crossentropy")


def test_an_invalid_number_of_classes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^`classes` must be a positive integer.*Received: classes=0"):
        replace(Y, classes=0)
