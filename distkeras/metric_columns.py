"""The columns of metrics next to fixed ones, in `history` and in evaluations: every metric has one of its own.

A metric of one number for each class, such as an `F1Score` without an average, travels as its elements. Importing this
module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

#: Names that a metric's column cannot have: those of `history`, of evaluations and of curves that are made of both.
RESERVED = ("worker", "epoch", "iteration", "timestamp", "samples", "seconds", "steps", "clock", "rows")
_ELEMENT = re.compile(r"(.*)\[(\d+)\]", re.DOTALL)


def columns_of(metrics: Iterable[str]) -> dict[str, str]:
    """Return the column of each metric: its name, unless that is taken, and else with "_2", or the next number.

    Spark does not distinguish upper and lower case: "AUC" next to "auc" becomes "AUC_2". A name is taken if it is
    `RESERVED`, or that of a metric before; no metric gets the name of another one.
    """
    names = list(metrics)
    taken, own = set(RESERVED), {name.casefold() for name in names}
    columns = {}
    for name in names:
        column, number = name, 1
        while column.casefold() in taken or (number > 1 and column.casefold() in own):
            number += 1
            column = f"{name}_{number}"
        taken.add(column.casefold())
        columns[name] = column
    return columns


def in_columns(values: Mapping[str, T]) -> dict[str, T]:
    """Return metrics by column instead of name."""
    columns = columns_of(values)
    return {columns[name]: value for name, value in values.items()}


def with_arrays(values: Mapping[str, float]) -> dict[str, Any]:
    """Return metrics by name, with the elements of an array as one."""
    names, numbers = list(values), list(values.values())
    arrays = {name: [numbers[place] for place in places] for name, places in arrays_of(names).items()}
    return {name: found[0] if name in values else np.array(found) for name, found in arrays.items()}


def elements_of(name: str, shape: Sequence[int | None]) -> list[str]:
    """Return the names of the numbers of a metric: "f1[0]", "f1[1]" and so on, or its own if it is a single one."""
    return [f"{name}[{place}]" for place in range(shape[0] or 0)] if shape else [name]


def arrays_of(metrics: Sequence[str]) -> dict[str, list[int]]:
    """Return the places of each metric's numbers in ``metrics``, which name the elements of arrays one by one."""
    whole: dict[str, list[int]] = {}
    for place, name in enumerate(metrics):
        match = _ELEMENT.fullmatch(name)
        array = name if match is None else match[1]
        if match is None or array in metrics or int(match[2]) != len(whole.get(array, [])):
            whole[name] = [place]
        else:
            whole.setdefault(array, []).append(place)
    return whole
