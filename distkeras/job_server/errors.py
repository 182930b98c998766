"""The states of a job, and the errors of the job server, each with its HTTP status, by which the client finds it again.

None of these errors travels to or from a parameter server, so none is in the table of `distkeras.ps.errors`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar

from distkeras.ps.errors import ConfigurationError, DistkerasError

#: The error that a client raises for a status; for any other status it is `JobServerError`.
BY_STATUS: dict[int, type[JobServerError]] = {}


class JobServerError(DistkerasError):
    """The base of the errors that the job server answers with."""

    status: ClassVar[int] = 500

    def __init_subclass__(cls, status: int | None = None) -> None:
        super().__init_subclass__()
        if status is not None:
            cls.status = status
            BY_STATUS[status] = cls


class DescriptionError(JobServerError, ConfigurationError, status=422):
    """The request, a job's description or its model is not valid; ``field`` names the part.

    Args:
        message: what was expected and what was received.
        field: the field of the description, such as "options.batch_size"; "model" for the archive.
    """

    def __init__(self, message: str, field: str = "", **more: Any) -> None:
        super().__init__(message, **more)
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.field)


def refused(field: str, expected: str) -> DescriptionError:
    """Return the error about a field that must ``expected``, which ends with what was received."""
    return DescriptionError(f"`{field}` must {expected}", field)


class UnauthorizedError(JobServerError, PermissionError, status=401):
    """The token is missing or not valid."""


class ForbiddenError(JobServerError, PermissionError, status=403):
    """The request needs another role."""


class NotFoundError(JobServerError, LookupError, status=404):
    """It does not exist, or it belongs to another user: the answer is the same."""


class StateError(JobServerError, status=409):
    """The state of a job, which the text names, does not allow the request."""


class QuotaError(JobServerError, status=413):
    """The request is too large, or the user would have too many bytes or waiting jobs."""


class RateError(JobServerError, status=429):
    """Too many requests without a valid token came from one address."""


class UnavailableError(JobServerError, status=503):
    """The server's database does not answer; the request may be sent again."""


class StorageError(JobServerError, status=507):
    """The server's disk is nearly full."""


class JobFailedError(JobServerError, RuntimeError):
    """A job failed, was cancelled or was lost. The client raises it, with the server's reason."""


class JobState(enum.StrEnum):
    """The states of a job."""

    QUEUED = "queued"
    STARTING = "starting"
    TRAINING = "training"
    PREDICTING = "predicting"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"


_ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED, JobState.LOST})

#: The states that may follow each one. A job whose driver died without a result is queued again, to continue from its
#: checkpoint.
TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.CANCELLED}),
    JobState.STARTING: _ENDED | {JobState.TRAINING, JobState.PREDICTING, JobState.QUEUED},
    JobState.TRAINING: _ENDED | {JobState.QUEUED},
    JobState.PREDICTING: _ENDED | {JobState.QUEUED},
    **dict.fromkeys(_ENDED, frozenset()),
}
#: The states that no other state follows.
FINAL = frozenset(state for state, following in TRANSITIONS.items() if not following)
#: The states in which a server is responsible for the job.
ACTIVE = frozenset({JobState.STARTING, JobState.TRAINING, JobState.PREDICTING})
#: The kinds of jobs.
TRAIN, PREDICT = "train", "predict"
#: The state in which the driver of each kind of job works.
WORKING_STATES = {TRAIN: JobState.TRAINING, PREDICT: JobState.PREDICTING}


def before(state: JobState) -> frozenset[JobState]:
    """Return the states that ``state`` may follow."""
    return frozenset(earlier for earlier, following in TRANSITIONS.items() if state in following)
