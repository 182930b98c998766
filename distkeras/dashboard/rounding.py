"""Numbers as a page needs them: four digits of each, and JSON's null for what is not finite."""

from __future__ import annotations

from typing import Any

import numpy as np

_DIGITS = 4


def rounded(values: np.ndarray) -> Any:
    """Nested lists of ``values``, of any shape, each with four significant digits; None for a NaN or infinity."""
    values = np.asarray(values, np.float64)
    with np.errstate(all="ignore"):
        magnitude = np.floor(np.log10(np.abs(values)))
        # Decimals below the point; whole numbers are kept as they are.
        decimals = np.clip(np.nan_to_num(_DIGITS - 1 - magnitude, nan=0.0, posinf=0.0, neginf=0.0), 0, 300)
        factor = 10.0**decimals
        shown = np.where(decimals > 22, values, np.round(values * factor) / factor)  # beyond, powers are inexact
    told = shown.astype(object)
    told[~np.isfinite(shown)] = None
    return told.tolist()


def ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """``above / below``; NaN where there is nothing below."""
    with np.errstate(all="ignore"):
        return np.where(below > 0, above / np.where(below > 0, below, 1.0), np.nan)


def number(value: float | None) -> float | None:
    """One number likewise."""
    found: float | None = None if value is None else rounded(np.asarray(value))
    return found
