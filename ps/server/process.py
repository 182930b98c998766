"""The start of a server: its request, the snapshot that it restores, its report; and the server as the driver's child.

A child shares no interpreter lock with its driver, and ends with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import select
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import distkeras
from distkeras.ps.center.center import Center
from distkeras.ps.center.micro_batches import number_of
from distkeras.ps.checkpoint.checkpointer import StartMode
from distkeras.ps.checkpoint.snapshots import Saved, SnapshotDirectory
from distkeras.ps.checkpoint.state import rule_json, sum_of_rows
from distkeras.ps.errors import (
    ConfigurationError,
    DeadlineError,
    DistkerasError,
    LocalProtocolError,
    OwnershipLostError,
    ServerLostError,
)
from distkeras.ps.events import Events, handle, record_from_json
from distkeras.ps.protocol.framing import KEY_BYTES
from distkeras.ps.server.dispatcher import Dispatcher
from distkeras.ps.server.server import Answering, ParameterServer
from distkeras.ps.server.shard_role import ShardRole
from distkeras.ps.server.start_report import (
    Loading,
    NotStarted,
    PortTakenError,
    ResumePoint,
    Started,
    StartReport,
    report_from_json,
)
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address, Certificate, make_certificate, server_context
from distkeras.ps.transport.deadlines import Backoff
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.world.processes import PIECE, POLL_SECONDS, Child
from distkeras.ps.world.streams import Listener
from distkeras.ps.world.world import REAL, Thread, World

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
        shard: the process is one of the shards of a server, and not the server itself.
    """

    settings: ServerSettings
    key: bytes = field(repr=False)
    certificate: Certificate | None = None
    mode: StartMode = field(default_factory=StartMode)
    job: Mapping[str, Any] = field(default_factory=dict)
    token: str = field(default_factory=lambda: secrets.token_hex(4), compare=False)
    shard: ShardRole | None = None

    def again(self, epoch: int, after: int, port: int | None = None) -> StartRequest:
        """Return the request for a server that replaces this one; a job's requests differ only in these values."""
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
                "shard": self.shard and dataclasses.asdict(self.shard),
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
            shard=values["shard"] and ShardRole(**values["shard"]),
        )


class ServerKind:
    """How a server is made: one that has the whole center; a subclass makes one whose center is divided."""

    #: Whether it reads the vectors of a center that was divided.
    reads_parts = True
    #: The client that publishes to it.
    client: type[DriverClient] = DriverClient

    def make_center(self, settings: ServerSettings, saved: Saved, incarnation: int, world: World) -> Center:
        """Return a center of the sizes of ``saved``."""
        arrays = saved.state.arrays
        return settings.make_center(arrays["center"], arrays["moving_statistics"], incarnation, world)

    def make_dispatcher(
        self,
        settings: ServerSettings,
        incarnation: int,
        snapshots: SnapshotDirectory | None,
        restored: tuple[Center, Saved] | None,
        world: World,
    ) -> Answering:
        """Return what answers the server's requests."""
        return Dispatcher(settings, incarnation=incarnation, snapshots=snapshots, restored=restored, world=world)

    def bare(self, saved: Saved) -> Saved:
        """Return ``saved`` with the vectors that this kind of server keeps."""
        return saved

    def served(
        self, server: ParameterServer, require_to_stay: Callable[[], None]
    ) -> AbstractContextManager[Callable[[], None]]:
        """Return the context in which a server that announces itself serves; it yields a check, for each second.

        What the server needs elsewhere is there when the context begins; ``require_to_stay`` may end that wait.
        """
        return contextlib.nullcontext(lambda: None)

    def has_clients(self, server: ParameterServer) -> bool:
        """Return whether the driver or a worker is connected."""
        return bool(server.sessions)


def build_server(
    request: StartRequest,
    world: World = REAL,
    record_activity: Callable[[], object] = lambda: None,
    *,
    listener: Listener | None = None,
    attempt: int | None = None,
    kind: ServerKind | None = None,
) -> tuple[ParameterServer, Started]:
    """Return a server with a bound port, and with a center if it restored one; it does not serve yet.

    ``listener`` is the port, if it is bound already: the claim to the checkpoint then names it.
    """
    settings, mode, incarnation, epoch = request.settings, request.mode, 1, 0
    kind = kind or ServerKind()
    if mode.epoch:
        settings = dataclasses.replace(settings, deadlines=settings.deadlines.after_restart())
    snapshots: SnapshotDirectory | None = None
    restored: tuple[Center, Saved] | None = None
    resumed: ResumePoint | None = None
    if settings.checkpoint is not None:
        job = {"rule": rule_json(settings.rule), **request.job}
        uri, token = settings.checkpoint.uri, request.token
        snapshots = SnapshotDirectory(uri, job, token, world, record_activity, whole=kind.reads_parts)
        place = None if listener is None else {"address": list(listener.address)}
        saved = snapshots.take_over(fresh=mode.fresh, epoch=mode.epoch, after=mode.after, attempt=attempt, place=place)
        epoch = snapshots.claim.epoch
        incarnation = max(snapshots.claim.incarnation, 0 if saved is None else 1 + saved.state.header["incarnation"])
        if saved is not None:
            center, saved = kind.make_center(settings, saved, incarnation, world), kind.bare(saved)
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
                complete=center.leases.complete,
            )
            restored = (center, saved)
    server = ParameterServer(
        settings,
        request.key,
        context=None if request.certificate is None else server_context(request.certificate),
        snapshots=snapshots,
        dispatcher=kind.make_dispatcher(settings, incarnation, snapshots, restored, world),
        world=world,
        listener=listener,
    )
    return server, Started(*server.address, resumed, incarnation, epoch)


Build = Callable[[StartRequest, World, Callable[[], object]], tuple[ParameterServer, Started]]


def serve(
    make_request: Callable[[], StartRequest],
    send_report: Callable[[StartReport], None],
    until_done: Callable[[ParameterServer], int],
    accompany: Callable[[StartRequest, ParameterServer, Callable[[], object]], AbstractContextManager[object]],
    world: World = REAL,
    require_driver: Callable[[], None] = lambda: None,
    build: Build = build_server,
) -> int:
    """Build the server in its process, report the outcome, and serve until ``until_done`` returns.

    Args:
        send_report: receives the reports, until the server is up.
        until_done: waits until the process must end, and returns its exit status.
        accompany: what runs while the server does, such as the processes of its shards; it calls its last argument
            while they start.
        require_driver: raises a DistkerasError if the driver has ended; then this server must not claim the checkpoint.
        build: `build_server`, or a function with the same arguments.

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
            send_report(Loading())

    try:
        request = make_request()
        server, report = build(request, world, record_activity)
    except (DistkerasError, OSError) as error:
        send_report(NotStarted.of(error))
        return 2
    with server, accompany(request, server, record_activity):
        starting = False
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


#: The line with which the driver ends the server.
GOODBYE = b"goodbye\n"


class DriverLink:
    """The server's end of the pipe from its driver: lines, until the driver says goodbye or ends.

    ``driver`` is a descriptor of the driver's process, from `ChildProcess`; None: there is none.
    """

    def __init__(self, stream: int, driver: int | None) -> None:
        self._stream = stream
        self._driver = driver
        self._parent = os.getppid()
        self._received = b""
        self._poller = select.poll()
        self._poller.register(stream, select.POLLIN)
        if driver is not None:
            self._poller.register(driver, select.POLLIN)

    def line(self, over: Callable[[], bool] = lambda: False) -> str | None:
        """Return the next line; None if the driver has said goodbye or ended, or if ``over()`` is true."""
        while b"\n" not in self._received:
            if over():
                return None
            ready = [descriptor for descriptor, _ in self._poller.poll(1000 * POLL_SECONDS)]
            if self._stream in ready:
                piece = os.read(self._stream, PIECE)
                if not piece:
                    return None
                self._received += piece
            elif self._driver in ready or os.getppid() != self._parent:
                return None
        line, _, self._received = self._received.partition(b"\n")
        return None if line + b"\n" == GOODBYE else line.decode()

    def require_driver(self) -> None:
        """Raise a ServerLostError if the driver's process has ended; do not read from its pipe."""
        if self._driver in [descriptor for descriptor, _ in self._poller.poll(0)] or os.getppid() != self._parent:
            raise ServerLostError("the driver of this server has ended")

    def wait_until_over(self, over: Callable[[], bool] = lambda: False) -> None:
        """Return when the driver has said goodbye or ended, or when ``over()`` is true."""
        while self.line(over) is not None:
            pass


log = logging.getLogger(__name__)

#: Seconds for the process to start, to end, to end with a last snapshot, and between two attempts at a taken port.
_START, _END, _END_SAVING, _RETRY_SECONDS = 120.0, 10.0, 120.0, 0.2
#: How often a job with a checkpoint tries to start its first server.
_ATTEMPTS = 3
#: Errors after which the first server is started again: it was killed or suspended; or another server, whose driver
#: may be dead, claimed the checkpoint at the same moment, and the next claim will be higher.
_RESTART_ERRORS = (ServerLostError, DeadlineError, OwnershipLostError)


class ServerProcess:
    """A parameter server for one job, with a fresh random key.

    The child serves until `close`, or until this process ends in any way (`DriverLink`), so that no server survives its
    driver. The key, and the private key of a certificate, go through a pipe, never through arguments or the
    environment. In a forked copy of this process, `close` does nothing.

    What the child logs goes to this process' loggers of the same names, with level and time; everything else that it
    writes to its standard error goes to this module's logger.

    Args:
        settings: the server's options; the executors must be able to reach its host.
        resume: resume the job whose snapshots the settings' ``checkpoint`` holds, if there are any. Else there must be
            none.
        job: JSON-ready values that a job which resumes must share.
        tls: encrypt every connection, with a certificate made for this job.
        events: collects the events that the child logs.
        ahead: a process of `spawn_server`, which becomes the first server if it is still running.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        resume: bool = False,
        job: Mapping[str, Any] | None = None,
        epochs: int | None = None,
        tls: bool = False,
        events: Events | None = None,
        world: World = REAL,
        ahead: Child | None = None,
    ) -> None:
        self._world = world
        self._ahead = ahead
        self.settings = settings
        self._events = events or Events()
        self._request = StartRequest(
            settings=settings,
            key=world.token(KEY_BYTES),
            certificate=make_certificate() if tls else None,
            mode=StartMode(fresh=not resume, same_attempts=False, epochs=epochs),
            job=job or {},
            token=world.token(4).hex(),
        )
        self._child: Child | None = None
        #: The process that the child belongs to.
        self._owner = os.getpid()
        self._log_reader: Thread | None = None
        self._address: Address | None = None
        #: The latest server's incarnation, and the epoch of the job's claims to the checkpoint; 0 before the first.
        self._incarnation = self._epoch = 0
        #: The progress of the restored center; None: the center is new.
        self.resumed: ResumePoint | None = None

    def start(self) -> None:
        """Start the process, and wait until it listens.

        Raises:
            ConfigurationError: a setting is invalid, the port cannot be bound, or the snapshots belong to another job.
            SnapshotError: the snapshots cannot be read.
            OwnershipLostError: other servers claimed the checkpoint at the same moments, or another job's has taken it
                over since the first one claimed it.
            DeadlineError: the process did not start, or was suspended while it read, more than once.
        """
        for attempts_left in reversed(range(_ATTEMPTS if self.settings.checkpoint else 1)):
            try:
                report = self._launch(self._request)
                break
            except _RESTART_ERRORS:
                if not attempts_left:
                    raise
        self._address = self._request.address_at(report.host, report.port)

    def _launch(self, request: StartRequest) -> Started:
        self._owner = os.getpid()
        ahead, self._ahead = self._ahead, None
        alive = ahead is not None and ahead.exit_code is None
        child = self._child = ahead if ahead and alive else spawn_server(self._world)
        self._log_reader = self._world.thread(lambda: self._read_log(child), f"distkeras-log-{child.pid}")
        self._log_reader.start()
        try:
            report = ask(child, request)
        except BaseException:
            child.kill()
            self.close()
            raise
        if isinstance(report, NotStarted):
            self.close()
            raise report.to_error()
        self.resumed, self._incarnation, self._epoch = report.resumed, report.incarnation, report.epoch
        return report

    def restart(self) -> None:
        """Start a dead server again, at the same address, from its latest snapshot: see `resumed`.

        Raises:
            ServerLostError: there are no snapshots to restore.
            OwnershipLostError: another server owns them now.
        """
        if self.settings.checkpoint is None:
            raise ServerLostError(
                "the parameter server has died, and the job has no `checkpoint` to restart it from. Its log above may "
                "say why it died. Train again, with a `checkpoint` if that must not end a job"
            )
        self.close()
        backoff = Backoff(first=_RETRY_SECONDS, longest=_RETRY_SECONDS, timeout=_START, world=self._world)
        while True:
            try:
                self._launch(self._request.again(self._epoch, self._incarnation, self.address.port))
                return
            except PortTakenError:  # the system may have assigned the port to an outgoing connection for a moment
                if not backoff.pause():
                    raise

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def address(self) -> Address:
        if self._address is None:
            raise LocalProtocolError("the server has no address before `start`")
        return self._address

    @property
    def pid(self) -> int:
        return self._started_child.pid

    def alive(self) -> bool:
        return self._started_child.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """The exit status, or minus the number of the signal that killed the process; None while it runs."""
        return self._started_child.exit_code

    def exited(self, timeout: float) -> bool:
        """Wait for up to ``timeout`` seconds; return whether the process has ended."""
        return self._started_child.wait(timeout)

    @property
    def _started_child(self) -> Child:
        if self._child is None:
            raise LocalProtocolError("the server has no process before `start`")
        return self._child

    def kill(self) -> None:
        """End the process at once; only its snapshots remain."""
        self._started_child.kill()
        self._started_child.wait(_END)

    def close(self) -> None:
        """End the process and wait for it; the port is free afterwards."""
        child = self._child
        if child is None or self._owner != os.getpid():
            return
        child.end_input(GOODBYE)
        if not child.wait(_END if self.settings.checkpoint is None else _END_SAVING):
            child.kill()
            child.wait(_END)
        child.close()
        if self._log_reader is not None:
            self._log_reader.join(_END)

    def _read_log(self, child: Child) -> None:
        for line in child.errors():
            text = line.decode("utf-8", "replace")
            record = record_from_json(text)
            try:
                if record is None:
                    log.warning("the parameter server: %s", text.rstrip())
                else:
                    self._events.add(record, "server")
                    handle(record)
            except Exception:  # noqa: BLE001 - of a log handler; without a reader, the server would block
                traceback.print_exc()


def spawn_server(world: World = REAL) -> Child:
    """Return a process that waits for a request, and ends when this process does; it imports the same distkeras."""
    home = str(Path(distkeras.__file__).resolve().parents[1])
    # An empty entry would mean the current directory as well.
    paths = [home, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1"}
    # One BLAS thread: the finite check must not take a core from workers on the same host.
    return world.spawn([sys.executable, "-m", "distkeras.ps", "child"], os.environ | variables)


def ask(child: Child, request: StartRequest) -> Started | NotStarted:
    """Send ``request`` to a new process, and return its report."""
    try:
        child.write(request.to_json().encode() + b"\n")
    except BrokenPipeError:
        raise ServerLostError("the parameter server ended before it had started. See its log above") from None
    while True:
        try:
            line = child.line(_START)
        except TimeoutError:
            raise DeadlineError(
                f"waited {_START:g} s for the parameter server to start. "
                "See its log above; this machine may be overloaded"
            ) from None
        if not line.endswith(b"\n"):
            child.wait(_END)
            raise ServerLostError(
                f"the parameter server ended with status {child.exit_code} before it had started. See its log above"
            )
        report = report_from_json(line)
        if isinstance(report, Started | NotStarted):  # any other shows that it is still reading its snapshot
            return report
