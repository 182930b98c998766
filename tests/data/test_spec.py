from __future__ import annotations

from typing import Any

import pytest

from distkeras.data.columns import Column
from distkeras.data.spec import DataSpec
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
        ({"sample_weight": Column("w", (2,))}, "sample_weight"),
        ({"classes": 0}, "classes"),
        ({"classes": (10, 10)}, "classes"),
        ({"classes": ()}, "classes"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_by_name(arguments: dict[str, Any], argument: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^`{argument}` must .* Received: "):
        DataSpec(**{"features": (X,), "labels": (Y,), **arguments})


def test_a_column_used_twice_is_read_once() -> None:
    assert DataSpec(features=(X, Z), labels=(X, Y), sample_weight=Z).columns == (X, Z, Y)


@pytest.mark.parametrize(("classes", "limits"), [(None, (None, None)), (3, (3, 3)), ((3, None), (3, None))])
def test_classes_are_for_all_labels_or_for_each(
    classes: int | tuple[int, None] | None, limits: tuple[int | None, int | None]
) -> None:
    assert DataSpec(features=(X,), labels=(Y, Z), classes=classes).class_limits == limits
