"""How a server begins: what it is asked, the snapshot that it goes on from, and what it reports."""

from __future__ import annotations

import dataclasses
import errno
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distkeras.ps.center.center import Center
from distkeras.ps.checkpoint.checkpointer import StartMode
from distkeras.ps.checkpoint.directory import Saved, SnapshotDirectory
from distkeras.ps.checkpoint.snapshot import rule_json, sum_of_rows
from distkeras.ps.errors import ERRORS, ConfigurationError, DistkerasError
from distkeras.ps.server.dispatcher import make_center
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.tls import Certificate, server_context
from distkeras.ps.world.streams import Listener
from distkeras.ps.world.world import REAL, World

#: How often a server that reads its snapshots says that it is at it, in seconds.
_LOADING_SECONDS = 1.0


@dataclass(frozen=True)
class StartRequest:
    """What a process needs to become a job's server.

    Args:
        settings: all that is no secret.
        key: the job's key, 32 bytes.
        certificate: encrypts every connection; None: plain.
        mode: how it begins where an earlier server may have left snapshots.
        job: JSON-ready values that a job which resumes must share with the one that was saved.
        token: of the job, 8 hexadecimal digits: which claims to its checkpoint are its own.
    """

    settings: ServerSettings
    key: bytes = field(repr=False)
    certificate: Certificate | None = None
    mode: StartMode = field(default_factory=StartMode)
    job: Mapping[str, Any] = field(default_factory=dict)
    token: str = field(default_factory=lambda: secrets.token_hex(4), compare=False)

    def again(self, epoch: int, after: int, port: int | None = None) -> StartRequest:
        """Return the request for a server that takes the place of this request's one.

        Every later request of a job is made here, so that it differs from the first one in what is named here alone.

        Args:
            epoch: of the job's claims to its checkpoint.
            after: incarnation of the server before.
            port: where the server must listen; None: where this request says.
        """
        settings = self.settings if port is None else dataclasses.replace(self.settings, port=port)
        return dataclasses.replace(self, settings=settings, mode=self.mode.again(epoch, after))

    def to_json(self) -> str:
        """One line, which `from_json` takes back."""
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
        """The request that `to_json` wrote.

        Raises:
            ConfigurationError: a setting that cannot work.
        """
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
    """Where the center stands that a server took from a snapshot.

    Args:
        clock: commits applied.
        incarnation: of the server that goes on from it.
        exact: every partition goes on exactly where it was; else all begin with ``epoch``.
        epoch: 0 where ``exact``.
        began_clock, began_epoch: what the partitions began with, in this job or before: an earlier number of workers
            had others.
        row_sum: over all rows (`checkpoint.row_sums`), where that is to be compared: each partition compares its own
            where ``exact``. None: it is not, or not known.
    """

    clock: int
    incarnation: int
    exact: bool
    epoch: int
    began_clock: int = 0
    began_epoch: int = 0
    row_sum: int | None = None


@dataclass(frozen=True)
class StartReport:
    """What a server's process tells its driver once it is up, or that it is not.

    Args:
        host, port: where it listens.
        resumed: where it goes on from; None: at the beginning.
        error: why it does not come up; empty: it does.
        port_taken: that is because another process has the port.
        code: which of `errors.ERRORS` that error is; -1: none of them.
        incarnation: of the server.
        epoch: of the job's claims to its checkpoint; 0: it has none.
        loading: it is still reading what it goes on from, and tells only that it is at it.
        ended: there is nothing to serve: another server of the same job has served it to its end.
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

    def to_json(self) -> str:
        """One line, which `from_json` takes back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> StartReport:
        """The report that `to_json` wrote."""
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
    """A server that has its port, and its center where there is a snapshot of it; it does not serve yet.

    Args:
        request: what is to be served.
        world: where.
        record_activity: called after each piece of a snapshot that was read.
        listener: its port, where that is bound already: the claim to the checkpoint names it.
        attempt: see `Ownership.write`.

    Raises:
        ConfigurationError: a setting that cannot work, or snapshots of another job.
        SnapshotError: the snapshots cannot be read.
        OwnershipLostError: they are another server's now.
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
        incarnation = max(snapshots.claim.incarnation, 0 if saved is None else 1 + saved.incarnation)
        if saved is not None:
            arrays = saved.state.arrays
            center = make_center(settings, arrays["center"], arrays["moving_statistics"], incarnation, world.time)
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
    tell: Callable[[StartReport], None],
    until_done: Callable[[ParameterServer], int],
    world: World = REAL,
    require_driver: Callable[[], None] = lambda: None,
) -> int:
    """What a server's process does: builds the server, tells what became of it, serves until ``until_done`` returns.

    Args:
        make_request: what is to be served.
        tell: takes the reports, until the server is up.
        until_done: returns the process' exit status, when it is to end.
        world: where.
        require_driver: raises a DistkerasError where the driver is gone: the snapshots are another one's to claim then.

    Returns:
        The process' exit status: 2, or what ``until_done`` returned.
    """
    reported_at, starting = world.monotonic(), True

    def record_activity() -> None:
        nonlocal reported_at
        if not starting:
            return
        require_driver()
        if world.monotonic() - reported_at >= _LOADING_SECONDS:
            reported_at = world.monotonic()
            tell(StartReport(loading=True))

    try:
        server, report = build_server(make_request(), world, record_activity)
    except (DistkerasError, OSError) as error:
        code = ERRORS.index(type(error)) if type(error) in ERRORS else -1
        tell(StartReport(error=str(error), port_taken=getattr(error, "errno", None) == errno.EADDRINUSE, code=code))
        return 2
    starting = False
    with server:
        tell(report)
        return until_done(server)


def key_from_text(text: str) -> bytes:
    """The key that ``python -m distkeras.ps key`` printed.

    Raises:
        ConfigurationError: it is something else.
    """
    try:
        return bytes.fromhex(text.strip())
    except ValueError:
        raise ConfigurationError("the key must be hexadecimal digits. Received: something else") from None
