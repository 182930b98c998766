"""What the job server refuses, each kind with its status of HTTP.

None of these travels to or from a parameter server, so none is in the table of `distkeras.ps.errors`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from distkeras.ps.errors import ConfigurationError, DistkerasError


class JobServerError(DistkerasError):
    """Base of what the job server answers in place of a result."""

    status: ClassVar[int] = 500


class DescriptionError(JobServerError, ConfigurationError):
    """A job's description, or its model, that cannot work.

    Args:
        message: what was expected and what came.
        field: where in the description, such as "options.batch_size"; "model" for the archive.
    """

    status = 422

    def __init__(self, message: str, field: str = "", **more: Any) -> None:
        super().__init__(message, **more)
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.field)


class UnauthorizedError(JobServerError, PermissionError):
    """No token, or one that is not valid."""

    status = 401


class ForbiddenError(JobServerError, PermissionError):
    """What takes another role."""

    status = 403


class NotThereError(JobServerError, LookupError):
    """There is no such thing, or it belongs to another user: the answer is the same."""

    status = 404


class StateError(JobServerError):
    """What a job's state does not allow; the text names the state."""

    status = 409


class QuotaError(JobServerError):
    """More than a user may have: of bytes, or of jobs that wait."""

    status = 413


class StorageError(JobServerError):
    """The server's disk is nearly full."""

    status = 507


class RateError(JobServerError):
    """Too many attempts to come in that failed."""

    status = 429


class JobFailedError(JobServerError, RuntimeError):
    """A job ended otherwise than well; raised by the client, with what the server says of it."""


#: What a client makes of a status; any other is a `JobServerError`.
BY_STATUS: dict[int, type[JobServerError]] = {
    kind.status: kind
    for kind in (
        DescriptionError,
        UnauthorizedError,
        ForbiddenError,
        NotThereError,
        StateError,
        QuotaError,
        StorageError,
        RateError,
    )
}
