"""dist-keras 0.2.1's names, where they are not this project's own: its scripts run, or fail with a named replacement.

The modules at dist-keras' old paths import from here::

    trainers  histories as lists and arrays, the text of `help`, refusals
    stages    its predictor and its evaluator; its job server and client, which are refused

No code of dist-keras is in it.
"""

from __future__ import annotations

import inspect
import warnings


class PortingWarning(UserWarning):
    """A call in the shape of dist-keras' that does something else here, or nothing."""


def warn_about_porting(text: str) -> None:
    """Warn at the nearest line that is not this package's."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("distkeras."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, PortingWarning, stacklevel=level)
