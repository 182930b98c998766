"""The argument ``decode``: how values of encoded columns become arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distkeras.ps.validate import invalid


def decoders(value: Any, features: Sequence[str]) -> dict[str, Callable[[Any], Any]]:
    """The argument ``decode``, by column; none for None.

    Raises:
        ConfigurationError: it is something else.
    """
    if value is None:
        return {}
    if callable(value) and len(features) == 1:
        return {features[0]: value}
    functions = value if isinstance(value, Mapping) else {}
    if not functions or not all(isinstance(k, str) and callable(v) for k, v in functions.items()):
        expected = "a function, where there is one column of features, or a dictionary: column to function"
        raise invalid("decode", value, expected)
    return dict(functions)
