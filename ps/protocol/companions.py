"""The commits of one group in one message: the sum of their movements, and the identity of each commit.

The workers of a host are a group. Each computes its window; the relay, which is one of them, adds the movements and
sends the sum as its own `Commit`, whose ``companions`` have the fields of the other workers' commits.

Rules:

1. Terms are added in the order of the workers' numbers, so a sum does not depend on the order of arrival.
2. A companion is identified by its attempt and by the number of its connection to the server: an earlier sum with a
   worker that has joined again since is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple, get_type_hints

import numpy as np

from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.protocol.loop import NO_FLOATS, NO_ROWS
from distkeras.ps.protocol.messages import OF_GROUP, Commit
from distkeras.ps.protocol.tables import Ids
from distkeras.ps.rules.base import Vector, all_finite, total_of

_KINDS = {int: "<i8", bool: "<i8", float: "<f8"}
_FIELDS = {name: kind for name, kind in get_type_hints(Commit).items() if kind in _KINDS and name not in OF_GROUP}
_BOOLEANS = [name for name, kind in _FIELDS.items() if kind is bool]
_values_of = attrgetter(*_FIELDS)

#: The dtype of one companion: the numbers of its commit, and of its connection; all columns have eight bytes.
COMPANION = np.dtype([*((name, _KINDS[kind]) for name, kind in _FIELDS.items()), ("connection", "<i8")])
_WIDTH = COMPANION.itemsize // 8


class Companion(NamedTuple):
    """A worker in the relay's commit: its ``connection`` as in its `Hello`, and its own commit."""

    connection: int
    commit: Commit


def is_finite(commit: Commit) -> bool:
    return all(map(all_finite, (*commit.parts, commit.moving_statistics)))


def join(own: Commit, others: Sequence[Companion], parts: tuple[Vector, ...]) -> Commit:
    """Return a group's commit: that of the relay, ``own``, with those of ``others``, summed in the memory ``parts``."""
    if not others:
        return replace(own, grouped=True)
    commits = sorted([own, *(other.commit for other in others)], key=lambda commit: commit.worker)
    for number, part in enumerate(parts):
        total_of([commit.parts[number] for commit in commits], part)
    rows = [(*_values_of(commit), connection) for connection, commit in others]
    histories = [own.history, *(other.commit.history for other in others)]
    return replace(
        own,
        parts=parts,
        moving_statistics=_mean_statistics(commits),
        history=np.concatenate(histories) if all(history.size for history in histories) else NO_ROWS,
        grouped=True,
        companions=np.array(rows, COMPANION).view(np.int64),
    )


def _mean_statistics(commits: Sequence[Commit]) -> Vector:
    if not commits[0].moving_statistics.size:
        return NO_FLOATS
    total = np.zeros_like(commits[0].moving_statistics)
    for commit in commits:
        total += commit.moving_statistics * np.float32(commit.steps)
    total /= np.float32(sum(commit.steps for commit in commits))
    return total


def split(commit: Commit) -> tuple[Commit, list[Companion]]:
    """Return the sender's own commit, with the whole payload, and its companions, or raise RemoteProtocolError."""
    if not commit.companions.size:
        return commit, []
    if not commit.grouped:
        raise RemoteProtocolError("only a group's commit may have companions", worker=commit.worker)
    if commit.companions.size % _WIDTH:
        raise RemoteProtocolError(
            f"`companions` must be rows of {_WIDTH} numbers. Received: {commit.companions.size} numbers",
            worker=commit.worker,
        )
    rows: Ids = commit.companions.view(COMPANION)
    steps = [commit.steps, *(rows["last"] - rows["first"] + 1).tolist()]
    workers = [commit.worker, *rows["worker"].tolist()]
    if len({*workers}) < len(workers) or min(steps) < 1 or len(commit.history) not in (0, sum(steps)):
        raise RemoteProtocolError(
            "a commit of a group must name each worker once, with steps, and have a row of history for each step. "
            f"Received: workers {workers}, steps {steps}, {len(commit.history)} rows",
            worker=commit.worker,
        )
    ends = np.cumsum(steps).tolist() if commit.history.size else [0] * len(steps)
    companions = [
        _companion(commit, dict(zip(COMPANION.names or (), row, strict=True)), commit.history[begin:end])
        for row, begin, end in zip(rows.tolist(), ends, ends[1:], strict=False)
    ]
    return replace(commit, history=commit.history[: ends[0]]), companions


def _companion(commit: Commit, values: dict[str, int | float], history: np.ndarray) -> Companion:
    connection = int(values.pop("connection"))
    values |= {name: bool(values[name]) for name in _BOOLEANS}
    own = Commit(
        wants_center=True,
        parts=(),
        history=history,
        incarnation=commit.incarnation,
        **values,  # type: ignore[arg-type]  # the columns are fields of their own kinds
    )
    return Companion(connection, own)
