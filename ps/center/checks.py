"""What a worker's messages must be before anything is done with them.

The checks of a commit are made outside of the center's lock, for they read every number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.errors import NonFiniteError, RemoteProtocolError, ShapeError
from distkeras.ps.protocol.compression import FORMATS, Codec, require_format
from distkeras.ps.protocol.layout import Layout
from distkeras.ps.protocol.messages import FIXED_HISTORY, Commit, Hello


def check_hello(center: Center, message: Hello) -> None:
    """Check that the worker's model is the center's, and that the rule supports its wire format.

    Raises:
        ShapeError, RemoteProtocolError, ConfigurationError: it is not.
    """
    if (message.size, message.moving_statistics) != (center.size, center.moving_statistics.size):
        raise ShapeError(
            f"the model must have {center.size} trainable and {center.moving_statistics.size} moving elements. "
            f"Received: {message.size} and {message.moving_statistics}",
            worker=message.worker,
        )
    if message.wire_format not in FORMATS:
        raise RemoteProtocolError(
            f"`wire_format` must be one of {FORMATS}. Received: wire_format={message.wire_format!r}",
            worker=message.worker,
        )
    require_format(message.wire_format, center.rule)


def check_shapes(center: Center, commit: Commit, codec: Codec | None = None) -> None:
    """Check the sizes of payload, statistics and history.

    Args:
        center: what the commit is for.
        commit: as it came.
        codec: of the parts that are packed; None: none may be.

    Raises:
        ShapeError: they have not.
    """
    sizes, packed = [part.size for part in commit.parts], [data.size for data in commit.packed]
    parts = center.traits.parts
    good = (sizes, packed) == (([center.size] * parts, []) if codec is None else ([], [codec.nbytes] * parts))
    if not good or commit.moving_statistics.size != center.moving_statistics.size:
        expected = f"{center.size} elements" if codec is None else f"{codec.nbytes} bytes"
        raise ShapeError(
            f"a commit must have {parts} parts of {expected} and {center.moving_statistics.size} statistics. "
            f"Received: {sizes} elements, {packed} bytes and {commit.moving_statistics.size}",
            worker=commit.worker,
            step=commit.first,
        )
    if not _history_fits(commit, center.log.columns):
        rows, columns = commit.history.shape
        raise ShapeError(
            f"a commit must have a row of history, of the same columns as all, for each of its {commit.steps} steps. "
            f"Received: {rows} rows of {columns}",
            worker=commit.worker,
            step=commit.first,
        )


def _history_fits(commit: Commit, log_columns: int) -> bool:
    """Return whether there is a row for each step, with the columns of all other commits' rows, or no row."""
    rows, columns = commit.history.shape
    if commit.steps < 1 or rows not in (0, commit.steps):
        return False
    return not rows or bool(columns >= len(FIXED_HISTORY) and columns == (log_columns or columns))


def not_finite(commit: Commit, parts: Sequence[np.ndarray], layouts: Sequence[Layout] = ()) -> NonFiniteError | None:
    """What is wrong with the numbers; None if each is finite.

    Args:
        commit: of the right shapes.
        parts: its parts as vectors.
        layouts: of the center and the statistics; none: the error names no array.
    """
    for part in (*parts, commit.moving_statistics):
        # One pass finds nearly all; the squares of large finite numbers overflow too, hence the second look.
        with np.errstate(over="ignore"):
            suspicious = part.size > 0 and not math.isfinite(float(np.dot(part, part)))
        if suspicious:
            bad = np.flatnonzero(~np.isfinite(part))
            if bad.size:
                where = f"element {bad[0]}"
                if layouts:
                    layout = layouts[part is commit.moving_statistics]
                    where = f"{layout.locate(int(bad[0]))} ({where})"
                return NonFiniteError(
                    f"a commit holds {part[bad[0]]} in {where} ({bad.size} such elements), from mini-batches "
                    f"{commit.first}-{commit.last} of epoch {commit.epoch}. Lower the learning rate or clip gradients",
                    worker=commit.worker,
                    step=commit.first,
                )
    return None
