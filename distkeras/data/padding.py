"""How rows of any length are padded: what the user has set, completed and checked for each column on the driver.

Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from distkeras.data.batches import DataSpec
from distkeras.data.columns import Column, check_range
from distkeras.data.rows import FEW, Padding
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import invalid

if TYPE_CHECKING:
    import keras


def compiles_each_length(model: keras.Model) -> bool:
    """Return whether a backend compiles a model's step for each length of a mini-batch."""
    import keras

    return keras.backend.backend() == "jax" or bool(model.jit_compile)


def paddings_of(value: Any) -> Padding | dict[str, Padding] | None:
    """Return the checked argument ``padding``."""
    if value is None or isinstance(value, Padding):
        return value
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and isinstance(padding, Padding) for name, padding in value.items()
    ):
        raise invalid("padding", value, "a `distkeras.Padding`, or a dictionary: column to `distkeras.Padding`")
    return dict(value)


def buckets(value: Padding | Mapping[str, Padding] | None) -> bool:
    """Return whether the argument ``padding`` asks for mini-batches of rows of like length."""
    paddings = value.values() if isinstance(value, Mapping) else [] if value is None else [value]
    return any(padding.bucket for padding in paddings)


def padding_json(value: Padding | Mapping[str, Padding] | None) -> Any:
    """Return the argument ``padding``, JSON-ready, with what differs from the defaults; see `padding_from_json`."""
    if isinstance(value, Padding):
        return {name: given for name, given in asdict(value).items() if given != getattr(Padding(), name)}
    return None if value is None else {column: padding_json(padding) for column, padding in sorted(value.items())}


def padding_from_json(value: Any) -> Any:
    """Return the argument ``padding`` from a dictionary of the fields of a `Padding`, or of one for each column.

    Raises:
        ConfigurationError: a field does not exist, or is invalid.
    """
    if not isinstance(value, Mapping):
        return value
    if value and all(isinstance(part, Mapping) for part in value.values()):
        return {column: padding_from_json(part) if part else Padding() for column, part in value.items()}
    unknown = [name for name in value if name not in {field.name for field in fields(Padding)}]
    if unknown:
        raise invalid("padding", value, f"of the fields {[field.name for field in fields(Padding)]}")
    return Padding(**value)


def of_columns(value: Padding | Mapping[str, Padding] | None, names: Iterable[str]) -> Any:
    """Return the argument ``padding`` without the columns that are not among ``names``."""
    known = set(names)
    if not isinstance(value, Mapping):
        return value
    return {column: padding for column, padding in value.items() if column in known} or None


def with_padding(spec: DataSpec, given: Padding | Mapping[str, Padding] | None, *, few: bool) -> DataSpec:
    """Return ``spec`` with the padding of each column whose rows have any length.

    Labels and weights with as many steps as an input are padded to its lengths, unless something else is ``given``.

    Args:
        few: whether mini-batches have few lengths, unless the user has set a multiple, or labels have other lengths.

    Raises:
        ConfigurationError: ``given`` names another column, or a value that the column cannot hold.
    """
    _require_known(given, spec.columns)
    by_column = given if isinstance(given, Mapping) else {}
    for_all = given if isinstance(given, Padding) else None
    of_inputs = {
        column.name: by_column.get(column.name, for_all or Padding()) for column in spec.features if column.is_open
    }
    of_steps = [column for column in (*spec.labels, *spec.weights) if column is not None and column.is_open]
    few = few and all(column.steps_of for column in of_steps)

    def completed(column: Any, default: Padding) -> Any:
        if column is None or not column.is_open:
            return column
        padding = by_column.get(column.name, default)
        value = (column.ignored or 0) if padding.value is None else padding.value
        multiple = (FEW if few else 1) if padding.multiple is None else padding.multiple
        _require_value(column, value)
        return replace(column, padding=replace(padding, value=value, multiple=multiple))

    features = tuple(completed(column, of_inputs.get(column.name, Padding())) for column in spec.features)

    def of_input(column: Column | None) -> Any:
        name = "" if column is None else column.steps_of
        return completed(column, replace(of_inputs[name], value=None) if name else Padding())

    return replace(spec.of_columns(of_input), features=features)


def require_paddings(given: Padding | Mapping[str, Padding] | None, columns: Sequence[Column]) -> None:
    """Raise ConfigurationError unless ``given`` is of some of ``columns``, with values that they can hold."""
    _require_known(given, columns)
    for column in columns:
        padding = given.get(column.name) if isinstance(given, Mapping) else given
        if padding is not None and column.is_open:
            _require_value(column, padding.value or 0)


def _require_known(given: Padding | Mapping[str, Padding] | None, columns: Sequence[Column]) -> None:
    known = list(dict.fromkeys(column.name for column in columns if column.is_open))
    unknown = [name for name in given if name not in known] if isinstance(given, Mapping) else []
    if unknown or (isinstance(given, Padding) and not known):
        received = f"padding of {unknown}" if unknown else f"padding={given}"
        raise ConfigurationError(
            f"`padding` must be of columns whose rows have any length, {known}. Received: {received}"
        )


def _require_value(column: Column, value: float) -> None:
    """Raise ConfigurationError unless a column can hold the number that fills its rows."""

    def bad(_place: int, expected: str, received: object) -> NoReturn:
        raise ConfigurationError(
            f"`padding` must have a value that the column can hold: {expected}. Received: value={received}",
            column=column.name,
        )

    with np.errstate(all="ignore"):
        values = np.array([value]).astype(column.dtype)
    if values[0] != value:
        bad(0, f"exact as {column.dtype}", value)
    check_range(values, column, bad)
