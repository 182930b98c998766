"""Checks of what a worker sends: its model and wire format, the sizes and rows of a commit, and that it is finite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.errors import ConfigurationError, NonFiniteError, RemoteProtocolError, ShapeError
from distkeras.ps.protocol.compression import FORMATS, Codec, require_format
from distkeras.ps.protocol.layout import Layout
from distkeras.ps.protocol.loop import FIXED_HISTORY
from distkeras.ps.protocol.messages import Commit, Hello
from distkeras.ps.protocol.tables import Ids, TableShape, describe
from distkeras.ps.rules.base import all_finite


def check_hello(
    center: Center, message: Hello, size: int | None = None, shapes: Sequence[TableShape] | None = None
) -> None:
    """Raise ShapeError, RemoteProtocolError or ConfigurationError unless model and wire format match the center.

    ``size`` and ``shapes`` are those of the whole center, if its elements and rows are elsewhere.
    """
    size = center.size if size is None else size
    if (message.size, message.moving_statistics) != (size, center.moving_statistics.size):
        raise ShapeError(
            f"the model must have {size} trainable and {center.moving_statistics.size} moving elements. "
            f"Received: {message.size} and {message.moving_statistics}",
            worker=message.worker,
        )
    tables = describe(center.table_shapes if shapes is None else shapes)
    if message.tables != tables:
        raise ShapeError(
            f"the worker's tables must be {tables or 'none'} (name, rows, width, rows of a window at most, seed, "
            "scale). "
            f"Received: {message.tables or 'none'}",
            worker=message.worker,
        )
    if message.wire_format not in FORMATS:
        raise RemoteProtocolError(
            f"`wire_format` must be one of {FORMATS}. Received: wire_format={message.wire_format!r}",
            worker=message.worker,
        )
    require_format(message.wire_format, center.rule)
    if tables and message.wire_format != FORMATS[0]:
        raise ConfigurationError(
            f"`wire_format` must be {FORMATS[0]!r} where tables travel by rows. "
            f"Received: wire_format={message.wire_format!r}",
            worker=message.worker,
        )


def check_shapes(center: Center, commit: Commit, codec: Codec | None = None) -> None:
    """Check the sizes of payload, statistics and history, and the rows; without a ``codec``, no part may be packed."""
    sizes, packed = [part.size for part in commit.parts], [array.size for array in commit.packed]
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
    if center.tables or commit.touched or commit.moved or commit.wants:
        check_rows(center.table_shapes, commit)
    if not _history_fits(commit, center.log.columns):
        rows, columns = commit.history.shape
        raise ShapeError(
            f"a commit must have one row of history for each of its {commit.steps} steps, with the job's columns. "
            f"Received: {rows} rows of {columns} columns",
            worker=commit.worker,
            step=commit.first,
        )


def _history_fits(commit: Commit, log_columns: int) -> bool:
    """Return whether the history is empty, or has a row for each step and the same columns as the log."""
    rows, columns = commit.history.shape
    if commit.steps < 1 or rows not in (0, commit.steps):
        return False
    return not rows or bool(columns >= len(FIXED_HISTORY) and columns == (log_columns or columns))


def not_finite(
    commit: Commit,
    parts: Sequence[np.ndarray],
    layouts: Sequence[Layout] = (),
    shapes: Sequence[TableShape] = (),
    offset: int = 0,
) -> NonFiniteError | None:
    """Return an error that names the first NaN or infinity of ``commit``, and its array; None: there is none.

    ``offset`` is the place in the center of the first element of ``parts``.
    """
    for part in (*parts, commit.moving_statistics):
        if not all_finite(part):
            bad, of_statistics = np.flatnonzero(~np.isfinite(part)), part is commit.moving_statistics
            place = int(bad[0]) + (0 if of_statistics else offset)
            where = f"element {place}"
            if layouts:
                where = f"{layouts[of_statistics].locate(place)} ({where})"
            return NonFiniteError(
                f"a commit holds {part[bad[0]]} in {where} ({bad.size} such elements), from mini-batches "
                f"{commit.first}-{commit.last} of epoch {commit.epoch}. Lower the learning rate or clip gradients",
                worker=commit.worker,
                step=commit.first,
            )
    return row_not_finite(commit, shapes) if shapes else None


def check_wants(shapes: Sequence[TableShape], wants: Sequence[Ids], worker: int) -> None:
    """Check the rows that a worker requests with a reply."""
    _check_ids(shapes, "wants", wants, worker, None)


def check_rows(shapes: Sequence[TableShape], commit: Commit) -> None:
    """Check the rows that ``commit`` names, and the sizes of its payload for them."""
    _check_ids(shapes, "touched", commit.touched, commit.worker, commit.first)
    _check_ids(shapes, "wants", commit.wants, commit.worker, commit.first)
    expected = [ids.size * shape.width for ids, shape in zip(commit.touched, shapes, strict=True)]
    sizes = [moved.size for moved in commit.moved]
    if sizes != expected:
        raise ShapeError(
            f"a commit must move its rows by {expected} elements, table by table. Received: {sizes}",
            worker=commit.worker,
            step=commit.first,
        )


def _check_ids(shapes: Sequence[TableShape], name: str, several: Sequence[Ids], worker: int, step: int | None) -> None:
    problem = None
    if len(several) != len(shapes):
        problem = f"`{name}` must have an array of rows for each of {len(shapes)} tables. Received: {len(several)}"
    for shape, ids in zip(shapes, several, strict=False):
        if ids.size > shape.most:
            problem = f"`{name}` must name at most {shape.most} rows of table {shape.name!r}. Received: {ids.size}"
        elif ids.size and not (ids[1:] > ids[:-1]).all():
            at = int(np.flatnonzero(ids[1:] <= ids[:-1])[0])
            problem = (
                f"`{name}` must name rows of table {shape.name!r} in ascending order, each once. "
                f"Received: {ids[at + 1]} behind {ids[at]}"
            )
        elif ids.size and not 0 <= ids[0] <= ids[-1] < shape.rows:
            wrong = ids[0] if ids[0] < 0 else ids[-1]
            problem = f"`{name}` must name rows of table {shape.name!r} in [0, {shape.rows}). Received: {wrong}"
    if problem is not None:
        raise ShapeError(problem, worker=worker, step=step)


def row_not_finite(commit: Commit, shapes: Sequence[TableShape]) -> NonFiniteError | None:
    """Return an error that names the first NaN or infinity in the rows of ``commit``; None if all are finite."""
    for shape, ids, moved in zip(shapes, commit.touched, commit.moved, strict=True):
        if not all_finite(moved):
            bad = np.flatnonzero(~np.isfinite(moved))
            row, column = divmod(int(bad[0]), shape.width)
            return NonFiniteError(
                f"a commit holds {moved[bad[0]]} in column {column} of row {ids[row]} of table {shape.name!r} "
                f"({bad.size} such elements), from mini-batches {commit.first}-{commit.last} of epoch {commit.epoch}. "
                "Lower the learning rate or clip gradients",
                worker=commit.worker,
                step=commit.first,
            )
    return None
