"""The reports of a server about its start: one line of JSON each, to its driver or in its announcement."""

from __future__ import annotations

import dataclasses
import errno
import json
from dataclasses import dataclass, field

from distkeras.ps.center.micro_batches import NO_MICRO_BATCH
from distkeras.ps.errors import ERRORS, ConfigurationError, DistkerasError


@dataclass(frozen=True)
class ResumePoint:
    """The progress of a center that a server restored from a snapshot: where a job continues an earlier one.

    Args:
        exact: every partition continues exactly after its last commit. Else the number of workers has changed, and all
            partitions begin with ``epoch``; rows of that epoch that were committed before are trained on again.
        epoch: the first epoch of this job; 0 if ``exact``.
        began_clock, began_epoch: clock and epoch at which the current partitions began, in this job or an earlier one;
            0 if the number of workers has never changed.
        row_sum: the sum over all rows (`state.sum_of_rows`), if the driver must compare it; None: each partition
            compares its own rows, or the sum is not known.
        stream, micro_batch: the stream and the micro-batch that the snapshot has begun; empty and -1: none.
        complete: every partition of that micro-batch has ended.
    """

    clock: int
    incarnation: int
    exact: bool
    epoch: int
    began_clock: int = 0
    began_epoch: int = 0
    row_sum: int | None = field(default=None, repr=False)
    stream: str = ""
    micro_batch: int = NO_MICRO_BATCH
    complete: bool = False


@dataclass(frozen=True)
class Started:
    """The server is up.

    Args:
        resumed: the progress that it restored; None: the job begins.
        incarnation: the server's number, which rises with each restart.
        epoch: the epoch of the job's claims to its checkpoint; 0: it has none.
    """

    host: str
    port: int
    resumed: ResumePoint | None = None
    incarnation: int = 0
    epoch: int = 0


@dataclass(frozen=True)
class Loading:
    """The server is still reading its snapshot."""


@dataclass(frozen=True)
class ServedToTheEnd:
    """Another server of the same job has served it to its end."""


class PortTakenError(ConfigurationError):
    """Another process has the port."""


@dataclass(frozen=True)
class NotStarted:
    """The server cannot start.

    Args:
        error: the reason.
        code: the position of the error's type in `errors.ERRORS`; -1: it is not in there.
    """

    error: str
    code: int = -1
    port_taken: bool = False

    @classmethod
    def of(cls, error: DistkerasError | OSError) -> NotStarted:
        """Return the report of a server that ``error`` ends."""
        code = ERRORS.index(type(error)) if type(error) in ERRORS else -1
        return cls(str(error), code, getattr(error, "errno", None) == errno.EADDRINUSE)

    def to_error(self) -> DistkerasError:
        """Return the error that the driver raises."""
        kind = ERRORS[self.code] if self.code >= 0 else ConfigurationError
        return (PortTakenError if self.port_taken else kind)(f"the parameter server must start. Received: {self.error}")


StartReport = Started | Loading | ServedToTheEnd | NotStarted
_KINDS: dict[str, type[StartReport]] = {kind.__name__: kind for kind in (Started, Loading, ServedToTheEnd, NotStarted)}


def report_to_json(report: StartReport) -> str:
    """Return one line, which `report_from_json` reads."""
    return json.dumps({"kind": type(report).__name__, **dataclasses.asdict(report)})


def report_from_json(text: str | bytes) -> StartReport:
    """Return the report that `report_to_json` wrote."""
    values = json.loads(text)
    kind = _KINDS[values.pop("kind")]
    if values.get("resumed") is not None:
        values["resumed"] = ResumePoint(**values["resumed"])
    return kind(**values)


def started_from_json(text: str) -> Started:
    """Return the report of a server that is up, from its announcement."""
    report = report_from_json(text)
    assert isinstance(report, Started), "only such a server announces itself"
    return report
