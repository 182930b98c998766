"""The start of a server: its request, the snapshot that it restores, and its report."""

from __future__ import annotations

import dataclasses
import errno
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distkeras.ps.center.center import Center
from distkeras.ps.center.micro_batches import NO_MICRO_BATCH, is_complete, number_of
from distkeras.ps.checkpoint.checkpointer import StartMode
from distkeras.ps.checkpoint.snapshots import Saved, SnapshotDirectory, rule_json, sum_of_rows
from distkeras.ps.errors import ERRORS, ConfigurationError, DistkerasError
from distkeras.ps.server.dispatcher import make_center
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.tls import Certificate, server_context
from distkeras.ps.world.streams import Listener
from distkeras.ps.world.world import REAL, World

#: Seconds between two reports of a server that is reading its snapshot.
_LOADING_SECONDS = 1.0


@dataclass(frozen=True)
class StartRequest:
    """The request to start a job's server, with everything that the process needs.

    Args:
        key: the job's key, 32 bytes.
        certificate: encrypts every connection; None: plain.
        mode: the start mode, if an earlier server may have left snapshots.
        job: JSON-ready values that a job which resumes must share with the saved job.
        token: 8 hexadecimal digits that identify the job's claims to its checkpoint.
    """

    settings: ServerSettings
    key: bytes = field(repr=False)
    certificate: Certificate | None = None
    mode: StartMode = field(default_factory=StartMode)
    job: Mapping[str, Any] = field(default_factory=dict)
    token: str = field(default_factory=lambda: secrets.token_hex(4), compare=False)

    def again(self, epoch: int, after: int, port: int | None = None) -> StartRequest:
        """Return the request for a server that replaces this one, at ``port`` if that is given.

        Every later request of a job is made here, so that it differs from the first one only in these values.
        """
        settings = self.settings if port is None else dataclasses.replace(self.settings, port=port)
        mode = dataclasses.replace(self.mode, epoch=epoch, after=after)
        return dataclasses.replace(self, settings=settings, mode=mode)

    def address_at(self, host: str, port: int) -> Address:
        """Return the address for the clients of this request's server, which listens at ``host`` and ``port``."""
        return Address(host, port, self.key, "" if self.certificate is None else self.certificate.certificate)

    def to_json(self) -> str:
        """Return one line, which `from_json` reads."""
        return json.dumps(
            {
                "settings": self.settings.to_json(),
                "key": self.key.hex(),
                "certificate": self.certificate and dataclasses.asdict(self.certificate),
                "mode": dataclasses.asdict(self.mode),
                "job": dict(self.job),
                "token": self.token,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> StartRequest:
        """Return the request that `to_json` wrote; raise a ConfigurationError for an invalid setting."""
        values = json.loads(text)
        return cls(
            settings=ServerSettings.from_json(values["settings"]),
            key=bytes.fromhex(values["key"]),
            certificate=values["certificate"] and Certificate(**values["certificate"]),
            mode=StartMode(**values["mode"]),
            job=values["job"],
            token=values["token"],
        )


@dataclass(frozen=True)
class ResumePoint:
    """The progress of a center that a server restored from a snapshot: where a job continues an earlier one.

    Args:
        clock: commits applied.
        incarnation: of the server that restored it.
        exact: every partition continues exactly after its last commit. Else the number of workers has changed, and all
            partitions begin with ``epoch``; rows of that epoch that were committed before are trained on again.
        epoch: the first epoch of this job; 0 if ``exact``.
        began_clock, began_epoch: clock and epoch at which the current partitions began, in this job or an earlier one;
            0 if the number of workers has never changed.
        row_sum: the sum over all rows (`snapshots.sum_of_rows`), if the driver must compare it; None: each partition
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
class StartReport:
    """The report of a server's process to its driver: it is up, or cannot start.

    Args:
        host, port: where it listens.
        resumed: the progress that it restored; None: the job begins.
        error: why it cannot start; empty: it is up.
        port_taken: another process has the port.
        code: the position of the error's type in `errors.ERRORS`; -1: it is not in there.
        incarnation: the server's number, which rises with each restart.
        epoch: the epoch of the job's claims to its checkpoint; 0: it has none.
        loading: the server is still reading its snapshot; the other fields are not set.
        ended: another server of the same job has served it to its end.
    """

    host: str = ""
    port: int = 0
    resumed: ResumePoint | None = None
    error: str = ""
    port_taken: bool = False
    code: int = -1
    incarnation: int = 0
    epoch: int = 0
    loading: bool = False
    ended: bool = False

    @classmethod
    def of_error(cls, error: DistkerasError | OSError) -> StartReport:
        """Return the report of a server that ``error`` ends."""
        code = ERRORS.index(type(error)) if type(error) in ERRORS else -1
        return cls(error=str(error), port_taken=getattr(error, "errno", None) == errno.EADDRINUSE, code=code)

    def to_json(self) -> str:
        """Return one line, which `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> StartReport:
        """Return the report that `to_json` wrote."""
        values = json.loads(text)
        return cls(**values | {"resumed": values["resumed"] and ResumePoint(**values["resumed"])})


def build_server(
    request: StartRequest,
    world: World = REAL,
    record_activity: Callable[[], object] = lambda: None,
    *,
    listener: Listener | None = None,
    attempt: int | None = None,
) -> tuple[ParameterServer, StartReport]:
    """Return a server with a bound port, and with a center if it restored one; it does not serve yet.

    Args:
        record_activity: called after each piece of a snapshot that was read.
        listener: the port, if it is bound already; the claim to the checkpoint then names it.
        attempt: see `Ownership.write`.

    Raises:
        ConfigurationError: a setting is invalid, or the snapshots belong to another job.
        SnapshotError: the snapshots cannot be read.
        OwnershipLostError: another server owns the checkpoint.
        OSError: the port cannot be bound.
    """
    settings, mode, incarnation, epoch = request.settings, request.mode, 1, 0
    snapshots: SnapshotDirectory | None = None
    restored: tuple[Center, Saved] | None = None
    resumed: ResumePoint | None = None
    if settings.checkpoint is not None:
        job = {"rule": rule_json(settings.rule), **request.job}
        snapshots = SnapshotDirectory(settings.checkpoint.uri, job, request.token, world, record_activity)
        place = None if listener is None else {"address": list(listener.address)}
        saved = snapshots.take_over(fresh=mode.fresh, epoch=mode.epoch, after=mode.after, attempt=attempt, place=place)
        epoch = snapshots.claim.epoch
        incarnation = max(snapshots.claim.incarnation, 0 if saved is None else 1 + saved.state.header["incarnation"])
        if saved is not None:
            arrays = saved.state.arrays
            center = make_center(settings, arrays["center"], arrays["moving_statistics"], incarnation, world)
            own = snapshots.own(saved)
            exact = snapshots.restore(
                center, saved, same_attempts=own or mode.same_attempts, epochs=None if own else mode.epochs
            )
            resumed = ResumePoint(
                center.clock,
                incarnation,
                exact,
                0 if exact else center.leases[0].epoch,
                *center.began,
                row_sum=None if exact else sum_of_rows(saved.state),
                stream="" if center.micro_batch is None else center.micro_batch.stream,
                micro_batch=number_of(center),
                complete=is_complete(center),
            )
            restored = (center, saved)
    server = ParameterServer(
        settings,
        request.key,
        context=None if request.certificate is None else server_context(request.certificate),
        incarnation=incarnation,
        snapshots=snapshots,
        restored=restored,
        world=world,
        listener=listener,
    )
    return server, StartReport(*server.address, resumed, incarnation=incarnation, epoch=epoch)


def serve(
    make_request: Callable[[], StartRequest],
    send_report: Callable[[StartReport], None],
    until_done: Callable[[ParameterServer], int],
    world: World = REAL,
    require_driver: Callable[[], None] = lambda: None,
) -> int:
    """Build the server in its process, report the outcome, and serve until ``until_done`` returns.

    Args:
        make_request: returns the request for the server.
        send_report: receives the reports, until the server is up.
        until_done: waits until the process must end, and returns its exit status.
        require_driver: raises a DistkerasError if the driver has ended; then this server must not claim the checkpoint.

    Returns:
        The process' exit status: 2 if the server cannot start, else the result of ``until_done``.
    """
    reported_at, starting = world.monotonic(), True

    def record_activity() -> None:
        nonlocal reported_at
        if not starting:
            return
        require_driver()
        if world.monotonic() - reported_at >= _LOADING_SECONDS:
            reported_at = world.monotonic()
            send_report(StartReport(loading=True))

    try:
        server, report = build_server(make_request(), world, record_activity)
    except (DistkerasError, OSError) as error:
        send_report(StartReport.of_error(error))
        return 2
    starting = False
    with server:
        send_report(report)
        return until_done(server)


def key_from_text(text: str) -> bytes:
    """Return the key that ``python -m distkeras.ps key`` printed; raise a ConfigurationError for another text."""
    try:
        return bytes.fromhex(text.strip())
    except ValueError:
        raise ConfigurationError(
            f"the key must be pairs of hexadecimal digits. Received: {len(text.strip())} characters"
        ) from None
