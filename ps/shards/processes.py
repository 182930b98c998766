"""The processes of a divided center: a sequencer starts its shards as children, and ends with the first that ends.

A shard is a child of the sequencer as the sequencer is one of the driver: none survives its parent. If a shard dies,
the sequencer ends too, and the driver starts another one, which starts new shards; all restore the latest snapshot.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.checkpoint.checkpointer import StartMode
from distkeras.ps.checkpoint.parts import bare_state
from distkeras.ps.checkpoint.snapshots import Saved, SnapshotDirectory
from distkeras.ps.errors import DeadlineError, DistkerasError, ServerLostError, SnapshotError
from distkeras.ps.protocol.messages import fault_of
from distkeras.ps.server.process import GOODBYE, ServerKind, StartRequest, ask, build_server, spawn_server
from distkeras.ps.server.server import Answering, ParameterServer
from distkeras.ps.server.shard_role import ShardRole
from distkeras.ps.server.start_report import NotStarted, Started
from distkeras.ps.settings import ServerSettings
from distkeras.ps.shards.sequencer import ELEMENTS, SequencingCenter
from distkeras.ps.shards.sequencer_server import SUSPENDED, SequencerDispatcher
from distkeras.ps.shards.shard_server import ShardDispatcher
from distkeras.ps.transport.client import server_context
from distkeras.ps.world.processes import POLL_SECONDS, Child
from distkeras.ps.world.world import REAL, Thread, World

#: Seconds for a shard to end.
_END = 10.0


class Divided(ServerKind):
    """A sequencer, whose shards restore what it has restored; ``mode``: that of its request."""

    reads_parts = False

    def __init__(self, mode: StartMode) -> None:
        self._mode = mode
        #: The number of elements of the center that was made last.
        self._size = 0

    def make_center(self, settings: ServerSettings, saved: Saved, incarnation: int, world: World) -> Center:
        arrays = saved.state.arrays
        self._size = max((part.stop for part in saved.parts), default=arrays["center"].size)
        make = partial(SequencingCenter, shards=settings.shards, shapes=settings.tables)
        zero = np.zeros(ELEMENTS, np.float32)
        return settings.make_center(zero, arrays["moving_statistics"], incarnation, world, (), make=make)

    def bare(self, saved: Saved) -> Saved:
        return replace(saved, state=bare_state(saved.state, ELEMENTS))

    def make_dispatcher(
        self,
        settings: ServerSettings,
        incarnation: int,
        snapshots: SnapshotDirectory | None,
        restored: tuple[Center, Saved] | None,
        world: World,
    ) -> Answering:
        snapshot, size = ("", 0) if restored is None else (restored[1].name, self._size)
        dispatcher = SequencerDispatcher(
            settings, incarnation=incarnation, snapshots=snapshots, restored=restored, size=size, world=world
        )
        claim = "" if snapshots is None else str(snapshots.claim)
        mode, own = self._mode, dispatcher.restored_own
        same_attempts, epochs = own or mode.same_attempts, None if own else mode.epochs
        dispatcher.role = ShardRole(0, "", 0, incarnation, claim, snapshot, same_attempts, epochs)
        return dispatcher


def build(
    request: StartRequest, world: World = REAL, record_activity: Callable[[], object] = lambda: None
) -> tuple[ParameterServer, Started]:
    """Return the server that ``request`` asks for, as `build_server` does: whole, a sequencer, or a shard."""
    if request.shard is not None:
        return _build_shard(request, request.shard, world, record_activity)
    if request.settings.shards == 1:
        return build_server(request, world, record_activity)
    return build_server(request, world, record_activity, kind=Divided(request.mode))


def _build_shard(
    request: StartRequest, role: ShardRole, world: World, record_activity: Callable[[], object]
) -> tuple[ParameterServer, Started]:
    settings = request.settings
    dispatcher = ShardDispatcher(settings, role, request.address_at(role.host, role.port), world)
    if role.snapshot:
        assert settings.checkpoint is not None
        uri = settings.checkpoint.uri
        try:
            dispatcher.restore(SnapshotDirectory(uri, None, request.token, world, record_activity, whole=False))
        except SnapshotError as error:  # the sequencer has read it; another owner may have removed it meanwhile
            raise ServerLostError(f"shard {role.shard} cannot restore {role.snapshot}: {error.message}") from error
    context = None if request.certificate is None else server_context(request.certificate)
    server = ParameterServer(settings, request.key, context=context, world=world, dispatcher=dispatcher)
    return server, Started(*server.address, incarnation=role.incarnation)


@contextlib.contextmanager
def accompany(
    request: StartRequest,
    server: ParameterServer,
    record_activity: Callable[[], object] = lambda: None,
    world: World = REAL,
) -> Iterator[None]:
    """Run what a server of its kind needs next to it: the shards of a sequencer, a shard's link to its sequencer.

    A sequencer's shards are up when the context begins, or the sequencer must end. While they read their snapshot,
    which may take long, ``record_activity`` is called.
    """
    dispatcher = server.dispatcher
    if isinstance(dispatcher, ShardDispatcher):
        dispatcher.register(server.address)
        yield
    elif isinstance(dispatcher, SequencerDispatcher):
        with ShardProcesses(request, server, dispatcher, world):
            while not dispatcher.wait_for_shards(POLL_SECONDS):
                record_activity()
            try:
                yield
            finally:
                dispatcher.close(request.settings.deadlines.close)  # the last snapshot needs the shards
    else:
        yield


class ShardProcesses:
    """The processes of a sequencer's shards."""

    def __init__(
        self, request: StartRequest, server: ParameterServer, dispatcher: SequencerDispatcher, world: World
    ) -> None:
        self._dispatcher, self._world = dispatcher, world
        self._closed = False
        host, port = server.address
        settings = replace(request.settings, port=0)
        role = replace(dispatcher.role, host=host, port=port)
        self._requests = [
            replace(request, settings=settings, shard=replace(role, shard=number)) for number in range(settings.shards)
        ]
        self._children: list[Child] = []
        self._threads: list[Thread] = []

    def __enter__(self) -> ShardProcesses:
        try:
            for number, request in enumerate(self._requests):
                child = spawn_server(self._world)
                self._children.append(child)
                for name, run in (("log", self._copy_log), ("watch", partial(self._watch, number, request))):
                    self._threads.append(self._world.thread(partial(run, child), f"shard-{number}-{name}"))
                    self._threads[-1].start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closed = True
        for child in self._children:
            child.end_input(GOODBYE)
        for child in self._children:
            if not child.wait(_END):
                child.kill()
                child.wait(_END)
        for thread in self._threads:  # which read the pipes
            if thread.ident is not None:
                thread.join(_END)
        for child in self._children:
            child.close()

    def _copy_log(self, child: Child) -> None:
        for line in child.errors():
            sys.stderr.write(line.decode("utf-8", "replace"))
            sys.stderr.flush()

    def _watch(self, number: int, request: StartRequest, child: Child) -> None:
        """Start a shard, and end the sequencer when it ends."""
        try:
            report = ask(child, request)
            if isinstance(report, NotStarted):
                raise report.to_error()
            looked_at = self._world.monotonic()
            self._dispatcher.asked_at.setdefault(number, looked_at)
            while not child.wait(POLL_SECONDS):
                if self._world.monotonic() - looked_at > SUSPENDED:  # no shard could ask this process for tickets
                    self._dispatcher.asked_at[number] = self._world.monotonic()
                looked_at = self._world.monotonic()
                self._dispatcher.require_attentive(number)
            raise ServerLostError(f"shard {number} has ended with status {child.exit_code}")
        except (ServerLostError, DeadlineError) as error:  # another one may start in time
            self._end_server(error.message)
        except DistkerasError as error:
            if not self._closed:
                self._dispatcher.changed.fail(fault_of(error))
        except Exception as error:  # noqa: BLE001 - without this thread, the end of the shard would not be seen
            self._end_server(f"shard {number} cannot be watched: {type(error).__name__}: {error}")

    def _end_server(self, reason: str) -> None:
        """Let the driver start another server, unless this one ends, or the job has an error that it must read here."""
        if not self._closed:
            self._dispatcher.lose(reason)
