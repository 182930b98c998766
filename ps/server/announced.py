"""A server that may have several attempts at a time, announces its address, and gives way without harm.

A cluster runs the server as a task. It retries the task if it dies, and may start a second attempt next to a slow one
(speculation). So an attempt may find another attempt of the same job. It waits while the other one is alive, takes over
if that one dies, and ends successfully if that one does. An attempt that has lost the checkpoint to another one waits
in the same way, so that it does not fail while another one serves.

The attempt connects to the address that the claim of the checkpoint's owner names. The port is bound before the claim
is written, so from then on:

* if nothing listens there, or another process does, or the host cannot be reached, the owner is dead;
* if connections are accepted and not answered, the owner is suspended, or still reads its snapshot. It is replaced
  after `Deadlines.standstill` seconds, and `Deadlines.publish` more if it has not announced itself yet;
* if it answers and has the job's key, it is alive.

A task may outlive its driver for a while. So each attempt checks that its driver is running before it claims the
checkpoint. Otherwise a restarted driver could lose the job to a task of the previous driver.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from distkeras.ps.checkpoint.ownership import Claim, Owner, owner_of
from distkeras.ps.checkpoint.snapshots import SnapshotDirectory
from distkeras.ps.errors import (
    ERRORS,
    ConfigurationError,
    DeadlineError,
    DistkerasError,
    LocalProtocolError,
    OwnershipLostError,
    ServerLostError,
    SnapshotError,
)
from distkeras.ps.events import report
from distkeras.ps.protocol.driver_messages import Publish
from distkeras.ps.protocol.framing import decode
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.server.process import ServerKind, StartRequest, build_server
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.server.start_report import NotStarted, ServedToTheEnd, Started, StartReport, report_to_json
from distkeras.ps.transport.deadlines import Backoff
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.world.world import REAL, World

log = logging.getLogger(__name__)

#: Seconds between two requests to the owner.
_RETRY_SECONDS = 1.0
#: How often a job's first server claims the checkpoint, if another job claims it at the same moment.
_STARTS = 3
#: Seconds from the driver's goodbye to the owner's end, in which it takes a last snapshot.
END_SAVING = 120.0
#: Seconds for which a server that lost the checkpoint to another job still answers its peers with that error.
_REFUSE_SECONDS = 10.0
#: Seconds between two checks of an idle server's state and of the time.
_POLL_SECONDS = 1.0
#: The key and the values of the state in an announcement; it has none while its server serves.
_STATE, ENDING, ENDED = "state", "ending", "ended"


class _Sign(enum.Enum):
    """The state of an owner, according to its answer or the lack of one."""

    ALIVE = enum.auto()
    SILENT = enum.auto()
    GONE = enum.auto()


class Standby:
    """Waits while another server of the same job owns the checkpoint and lives; those up to ``given_up`` do not."""

    def __init__(self, request: StartRequest, given_up: int = 0, world: World = REAL) -> None:
        self._uri = _uri_of(request)
        self._request, self._given_up, self._world = request, given_up, world
        own = request.settings.deadlines
        self._deadlines = replace(own, connect=min(own.connect, own.handshake))
        #: The owner that was read last.
        self._claim: Claim | None = None
        #: The clock, and the number of joined and of finished partitions, in the owner's latest answer.
        self._progress: tuple[int, int, int] | None = None
        #: When the owner last answered, and when its progress last changed.
        self._active_at = self._moved_at = world.monotonic()

    def other_owner(self) -> Owner | None:
        """Return the checkpoint's owner if it is a server of this job that the driver has not given up; else None."""
        owner = owner_of(self._uri, self._world)
        if owner is None or owner.claim.token != self._request.token or owner.claim.incarnation <= self._given_up:
            return None
        return owner

    def wait_until_needed(self, ending: Callable[[], bool] = lambda: False) -> bool:
        """Return True once no server of this job is alive, and False once one of them has served the job to its end."""
        while True:
            require_to_stay(ending)
            owner = self._read()
            if owner is None:
                return True
            if state_of(owner) is None:
                sign = self._follow(owner)
                if sign is _Sign.GONE and self._unchanged(owner):
                    return True
                silence = self._world.monotonic() - self._active_at
                patience = self._deadlines.standstill + (self._deadlines.publish if owner.announced is None else 0.0)
                if sign is _Sign.SILENT and silence >= patience:
                    text = "the server with claim %s has not answered for %.0f s, and is replaced"
                    report(log, "standstill", text, owner.claim, silence)
                    return True
            elif state_of(owner) == ENDED or self._world.monotonic() - self._active_at >= END_SAVING:
                return False
            self._world.sleep(_RETRY_SECONDS)

    def _read(self) -> Owner | None:
        """Return `other_owner()`; retry for a while if the directory cannot be read."""
        backoff = Backoff(
            first=_RETRY_SECONDS, longest=_RETRY_SECONDS, timeout=self._deadlines.standstill, world=self._world
        )
        while True:
            try:
                owner = self.other_owner()
                break
            except SnapshotError:  # a new owner may just have removed the files of this one
                if not backoff.pause():
                    raise
        if owner is not None and owner.claim != self._claim:
            log.info("the server with claim %s serves this job; this one waits as its standby", owner.claim)
            self._claim, self._progress = owner.claim, None
            self._active_at = self._moved_at = self._world.monotonic()
        return owner

    def _unchanged(self, owner: Owner) -> bool:
        """Return whether a dead ``owner`` has neither announced its end nor been replaced."""
        latest = self._read()
        return latest is not None and latest.claim == owner.claim and state_of(latest) is None

    def _follow(self, owner: Owner) -> _Sign:
        """Ask ``owner`` repeatedly until it does not answer; return SILENT or GONE."""
        while True:
            sign = self._ask(owner)
            if sign is not _Sign.ALIVE:
                return sign
            self._active_at = self._world.monotonic()
            if self._active_at - self._moved_at >= self._deadlines.silence:
                raise DeadlineError(
                    f"waited {self._deadlines.silence:g} s for a commit, as the standby of a server without progress"
                )
            self._world.sleep(_RETRY_SECONDS)

    def _ask(self, owner: Owner) -> _Sign:
        if owner.address is None:
            return _Sign.GONE
        client = DriverClient(self._request.address_at(*owner.address), self._deadlines, self._world)
        try:
            for _ in range(2):  # a connection may be cut
                try:
                    status = client.ping()
                except DistkerasError as error:
                    if client.channel is not None:  # the error is the owner's answer
                        return _Sign.ALIVE
                    if client.handshake_unanswered(error) or isinstance(error, DeadlineError):
                        return _Sign.SILENT
                else:
                    progress = (status.clock, status.joined, status.finished)
                    if progress != self._progress:
                        self._progress, self._moved_at = progress, self._world.monotonic()
                    return _Sign.ALIVE
            return _Sign.GONE
        finally:
            client.close()


def serve_announced(  # noqa: PLR0913 - independent facts of one attempt, which its caller names
    request: StartRequest,
    publication: bytes,
    *,
    tables: Sequence[tuple[TableShape, np.ndarray]] = (),
    attempt: int = 0,
    given_up: int = 0,
    rows_checked: bool = False,
    require_driver: Callable[[], None] = lambda: None,
    ending: Callable[[], bool] = lambda: False,
    world: World = REAL,
    kind: ServerKind | None = None,
) -> StartReport | None:
    """Serve a job to its end, as one of several attempts, of which one serves at a time.

    Args:
        request: describes the server; all attempts must reach its checkpoint.
        tables: the initial rows of each table, float32 ``(rows, width)``.
        attempt: the number of this attempt, unique among those that run at the same time.
        given_up: see `Standby`.
        rows_checked: the driver has already compared the rows with those of the resumed job.
        require_driver: raises a DistkerasError if the driver has died; then this attempt must not claim the checkpoint.
        ending: returns whether this process must end, after a last snapshot.
        kind: how the server is made; None: it has the whole center.

    Returns:
        None: this attempt has served to the end. `Started`: the rows must be checked first.

    Raises:
        ServerLostError, SnapshotError, OSError: another attempt may succeed.
    """
    standby, kind = Standby(request, given_up, world), kind or ServerKind()
    again, starts = attempt > 0, 0
    while standby.wait_until_needed(ending):
        try:
            server, start_report = _build(request, attempt, again, require_driver, world, kind)
        except OwnershipLostError as error:
            starts += 1
            # Another attempt was faster; or another job has claimed at the same moment: the next claim is higher.
            if standby.other_owner() is not None or (starts < _STARTS and not _has_lost_its_claims(request, world)):
                continue
            return NotStarted.of(error)
        except ConfigurationError as error:  # every other attempt would fail in the same way
            return NotStarted.of(error)
        resumed = start_report.resumed
        if resumed is not None and resumed.row_sum is not None and not rows_checked:
            with server:
                return start_report
        if again:
            text = "the parameter server's task had ended; it is back with commit %d of a snapshot, on %s (attempt %d)"
            report(log, "restart", text, 0 if resumed is None else resumed.clock, server.address[0], attempt)
        try:
            if _serve(server, start_report, request, publication, tables, ending, world, kind):
                return None
        except OwnershipLostError as error:  # clients cannot find this server; the driver detects the end of its task
            return NotStarted.of(error)
        again = True  # another attempt now owns the checkpoint; wait as its standby
    return ServedToTheEnd()


def _has_lost_its_claims(request: StartRequest, world: World) -> bool:
    """Return whether this job has owned the checkpoint before, so that the new owner's claim is final."""
    directory = SnapshotDirectory(_uri_of(request), token=request.token, world=world)
    return bool(directory.own_epoch()) or directory.is_superseded()


def _build(
    request: StartRequest,
    attempt: int,
    again: bool,
    require_driver: Callable[[], None],
    world: World,
    kind: ServerKind,
) -> tuple[ParameterServer, Started]:
    """Return a server that has claimed the checkpoint, with its report: see `build_server`."""
    uri = _uri_of(request)
    directory = SnapshotDirectory(uri, token=request.token, world=world)
    epoch = directory.own_epoch()
    if again and not epoch and directory.is_superseded():
        raise OwnershipLostError(
            f"another job has taken over the checkpoint {uri!r}; this one ends, and the other continues"
        )
    listener = world.listen(request.settings.host, request.settings.port)
    checked_at, starting = -math.inf, True

    def check_driver() -> None:
        nonlocal checked_at
        if starting and world.monotonic() - checked_at >= _RETRY_SECONDS:
            checked_at = world.monotonic()
            require_driver()

    try:
        return build_server(
            request.again(epoch, epoch), world, check_driver, listener=listener, attempt=attempt, kind=kind
        )
    except BaseException:
        listener.close()
        raise
    finally:
        starting = False


def _serve(
    server: ParameterServer,
    start_report: Started,
    request: StartRequest,
    publication: bytes,
    tables: Sequence[tuple[TableShape, np.ndarray]],
    ending: Callable[[], bool],
    world: World,
    kind: ServerKind,
) -> bool:
    """Serve until the driver has said goodbye; return False if another attempt now owns the checkpoint."""
    host, port = server.address
    place = {"host": host, "port": port, "report": report_to_json(start_report)}
    with server, kind.served(server, lambda: require_to_stay(ending)) as check:
        driver = kind.client(request.address_at(host, port), request.settings.deadlines, world, met=True)
        try:
            driver.publish_rows(tables)
            message = decode(publication)
            assert isinstance(message, Publish), message
            driver.send_publication(message)
        finally:
            driver.close()
        server.announce(place)
        _serve_until_over(server, ending, world, check, kind)
        if server.superseded:
            return False
        # Before the port is closed, so that a standby does not conclude that this server has died.
        _announce_end(server, place | {_STATE: ENDING})
    if server.superseded:
        return False
    _announce_end(server, place | {_STATE: ENDED})
    return True


def require_to_stay(ending: Callable[[], bool]) -> None:
    """Raise a ServerLostError if ``ending()``: this process must end."""
    if ending():
        raise ServerLostError("the process of this server must end; another one continues")


def _serve_until_over(
    server: ParameterServer,
    ending: Callable[[], bool],
    world: World,
    check: Callable[[], None],
    kind: ServerKind,
) -> None:
    """Return when the driver has said goodbye, or another attempt owns the checkpoint."""
    asked, lost_at = world.monotonic(), math.inf
    while not server.over and not server.superseded:
        require_to_stay(ending)
        check()
        fault = server.fault
        if fault is not None and ERRORS[fault.code] is OwnershipLostError:
            lost_at = min(lost_at, world.monotonic())
            if not kind.has_clients(server) or world.monotonic() - lost_at >= _REFUSE_SECONDS:
                raise OwnershipLostError(fault.message)
        if server.corrupt:
            raise ServerLostError("the center of this server is corrupt; another one starts from the latest snapshot")
        if kind.has_clients(server):
            asked = world.monotonic()
        elif world.monotonic() - asked > server.deadlines.silence:
            raise DeadlineError(f"waited {server.deadlines.silence:g} s for a request to the server")
        server.wait_for_change(_POLL_SECONDS)


def _announce_end(server: ParameterServer, place: dict[str, object]) -> None:
    with contextlib.suppress(SnapshotError):  # the driver is done, and cancels waiting attempts itself
        server.announce(place)


def state_of(owner: Owner) -> str | None:
    """Return the state that an owner has announced: None while it serves, or before."""
    return None if owner.announced is None else owner.announced.get(_STATE)


def _uri_of(request: StartRequest) -> str:
    if request.settings.checkpoint is None:
        raise LocalProtocolError(
            "a server that workers find through the checkpoint needs a `checkpoint`. Received: none"
        )
    return request.settings.checkpoint.uri
