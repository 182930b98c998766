"""dist-keras 0.2.1's names, where they are not this project's own: its scripts run, or fail with a named replacement.

Nothing else imports from here but the modules at dist-keras' old paths: ``distkeras.trainers``, ``predictors``,
``evaluators``, ``utils``, ``job_deployment``, and ``distkeras.transformers`` for the names that it lacks::

    refusals        what a name without an equivalent raises
    histories       the lists and arrays that its histories were
    accessors       the getters and setters of its trainers
    documents       what `help` says of its trainers
    transformers    its transformers that have another name or another result here
    predictors      its predictor: `predict`, and DenseVectors
    evaluators      the base class of its evaluators
    utils           its functions
    job_deployment  its job server and client, which are refused

No code of dist-keras is in it.
"""

from __future__ import annotations

import inspect
import warnings


class PortingWarning(UserWarning):
    """A call in the shape of dist-keras' that does something else here, or nothing."""


def warn_porter(text: str) -> None:
    """Warns at the line of the caller's that is not this package's."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("distkeras."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, PortingWarning, stacklevel=level)
