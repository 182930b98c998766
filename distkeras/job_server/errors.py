"""The errors of the job server, each with its HTTP status.

None of these travels to or from a parameter server, so none is in the table of `distkeras.ps.errors`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from distkeras.ps.errors import ConfigurationError, DistkerasError


class JobServerError(DistkerasError):
    """The base of the errors that the job server answers with."""

    status: ClassVar[int] = 500


class DescriptionError(JobServerError, ConfigurationError):
    """A job's description or model cannot work.

    Args:
        message: what was expected and what was received.
        field: the field of the description, such as "options.batch_size"; "model" for the archive.
    """

    status = 422

    def __init__(self, message: str, field: str = "", **more: Any) -> None:
        super().__init__(message, **more)
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.field)


class UnauthorizedError(JobServerError, PermissionError):
    """The token is missing or not valid."""

    status = 401


class ForbiddenError(JobServerError, PermissionError):
    """The request needs another role."""

    status = 403


class NotFoundError(JobServerError, LookupError):
    """It does not exist, or it belongs to another user: the answer is the same."""

    status = 404


class StateError(JobServerError):
    """The state of a job, which the text names, does not allow the request."""

    status = 409


class QuotaError(JobServerError):
    """The user would have too many bytes or waiting jobs."""

    status = 413


class StorageError(JobServerError):
    """The server's disk is nearly full."""

    status = 507


class UnavailableError(JobServerError):
    """The server's database does not answer; the request may be sent again."""

    status = 503


class RateError(JobServerError):
    """Too many requests without a valid token came from one address."""

    status = 429


class JobFailedError(JobServerError, RuntimeError):
    """A job failed, was cancelled or was lost. The client raises it, with the server's reason."""


#: The error that a client raises for a status; for any other status it is `JobServerError`.
BY_STATUS: dict[int, type[JobServerError]] = {
    kind.status: kind for kind in JobServerError.__subclasses__() if "status" in vars(kind)
}
