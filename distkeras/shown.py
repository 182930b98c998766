"""What `repr`, a notebook and Tab completion show of the objects that a user holds.

Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar


class Shown:
    """An object that shows its facts, and hides the attributes ``inner`` from Tab completion."""

    inner: ClassVar[frozenset[str]] = frozenset()

    def _facts(self) -> Mapping[str, Any]:
        """Return what to show, by name; None for what is not known yet."""
        raise NotImplementedError

    def __repr__(self) -> str:
        known = (f"{name}={value}" for name, value in self._facts().items() if value is not None)
        return f"{type(self).__name__}: {', '.join(known)}"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(str(value))}</td></tr>"
            for name, value in self._facts().items()
            if value is not None
        )
        return f"<b>{html.escape(type(self).__name__)}</b><table>{rows}</table>"

    def __dir__(self) -> Iterable[str]:
        return [name for name in super().__dir__() if name not in self.inner and name != "inner"]


def rounded(value: Any) -> Any:
    """Return a number with four significant digits, and anything else as it is."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
