"""Shards that are not children of their sequencer, but tasks of a cluster, which start and end at any time.

A shard's process looks for the owner of the checkpoint, whose claim has the address of the sequencer, and asks it to be
shard number k (`roles`). The first process that asks is the shard, while that connection lasts. Any other one, such as
a second copy of the task under speculation, waits. If the sequencer ends, or another one has claimed the checkpoint,
the process drops its elements, and asks the new one. If a shard ends, the sequencer ends too, and another one starts
from the latest snapshot, with all shards.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from distkeras.ps.checkpoint.ownership import Claim, Owner, owner_of
from distkeras.ps.errors import DeadlineError, DistkerasError, LocalProtocolError, ServerLostError, SnapshotError
from distkeras.ps.protocol.messages import Ack
from distkeras.ps.protocol.shard_messages import AskRole, Role
from distkeras.ps.server.announced import END_SAVING, ENDED, ENDING, require_to_stay, state_of
from distkeras.ps.server.process import StartRequest
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.server.shard_role import ShardRole
from distkeras.ps.shards.processes import Divided, accompany, build
from distkeras.ps.shards.sequencer_server import SequencerDispatcher
from distkeras.ps.shards.spread_driver import SpreadDriverClient
from distkeras.ps.transport.client import Client
from distkeras.ps.world.world import REAL, World

log = logging.getLogger(__name__)

#: Seconds between two questions to a sequencer, or two searches for one.
_RETRY_SECONDS = 1.0
#: Seconds between two checks whether another sequencer has claimed the checkpoint.
_LOOK_SECONDS = 5.0
#: Seconds for the shards to end after the job.
_END = 10.0
#: Bytes of the random number of a process.
_PROCESS_BYTES = 6
#: What answers a process that asks for the role of a shard.
_ANSWERS: tuple[type[Role | Ack], ...] = (Role, Ack)


class DividedAmongTasks(Divided):
    """A sequencer whose shards come by themselves; ``request`` is that of the job."""

    client = SpreadDriverClient

    def __init__(self, request: StartRequest, world: World = REAL) -> None:
        super().__init__(request.mode)
        self._deadlines, self._world = request.settings.deadlines, world

    @contextlib.contextmanager
    def served(self, server: ParameterServer, require_to_stay: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """See `ServerKind`: all shards have registered, and go on asking for tickets."""
        dispatcher, deadlines = server.dispatcher, self._deadlines
        assert isinstance(dispatcher, SequencerDispatcher)
        deadline = self._world.monotonic() + deadlines.rows
        while not dispatcher.wait_for_shards(_RETRY_SECONDS):
            require_to_stay()
            dispatcher.lose_silent_shards()
            if self._world.monotonic() >= deadline:
                raise DeadlineError(f"waited {deadlines.rows:g} s for the shards: each needs a slot of its own")
        try:
            yield dispatcher.lose_silent_shards
        finally:
            dispatcher.close(deadlines.close)  # the last snapshot needs the shards
            if server.over:
                dispatcher.dismiss_shards(_END)

    def has_clients(self, server: ParameterServer) -> bool:
        assert isinstance(server.dispatcher, SequencerDispatcher)
        return server.dispatcher.has_clients(server.sessions)


class ShardTask:
    """A process that is shard number ``shard`` of one sequencer of a job after the other, or waits as its standby.

    Args:
        request: the job's; its host is the one at which others reach this process.
        require_driver: raises a DistkerasError if the driver has died.
        ending: returns whether this process must end.
    """

    def __init__(
        self,
        request: StartRequest,
        shard: int,
        require_driver: Callable[[], None] = lambda: None,
        ending: Callable[[], bool] = lambda: False,
        world: World = REAL,
    ) -> None:
        if request.settings.checkpoint is None:
            raise LocalProtocolError("a shard finds its sequencer through a `checkpoint`. Received: none")
        self._uri = request.settings.checkpoint.uri
        # The port of the settings is the sequencer's, and may be one on this host.
        self._request = replace(request, settings=replace(request.settings, port=0))
        self._shard, self._require_driver, self._ending, self._world = shard, require_driver, ending, world
        own = request.settings.deadlines
        self._deadlines = replace(own, connect=min(own.connect, own.handshake))

    def serve(self) -> None:
        """Return once the job has ended.

        Raises:
            ServerLostError: this process must end, or the driver has died.
            DeadlineError: there is no sequencer of this job.
        """
        deadline, ended_by = self._world.monotonic() + self._deadlines.rows, math.inf
        while True:
            require_to_stay(self._ending)
            self._require_driver()
            owner = self._owner()
            state = None if owner is None else state_of(owner)
            if state == ENDING:  # the shards may be writing the last snapshot
                ended_by = min(ended_by, self._world.monotonic() + END_SAVING)
            if state == ENDED or self._world.monotonic() >= ended_by:
                return
            if owner is not None and owner.address is not None and state is None:
                over, served = self._serve_under(owner.claim, owner.address)
                if over:
                    return
                if served:
                    deadline = self._world.monotonic() + self._deadlines.rows
            if self._world.monotonic() >= deadline:
                raise DeadlineError(
                    f"waited {self._deadlines.rows:g} s for a server of this job that needs shard {self._shard}"
                )
            self._world.sleep(_RETRY_SECONDS)

    def _owner(self) -> Owner | None:
        """Return the checkpoint's owner if it is a server of this job."""
        try:
            owner = owner_of(self._uri, self._world)
        except SnapshotError as error:  # a new owner may just have removed the files of the former one
            log.debug("the owner of the checkpoint cannot be read: %s", error.message)
            return None
        return owner if owner is not None and owner.claim.token == self._request.token else None

    def _serve_under(self, claim: Claim, address: tuple[str, int]) -> tuple[bool, bool]:
        """Be a shard of the sequencer at ``address``; return whether the job has ended, and whether it has answered."""
        process = int.from_bytes(self._world.token(_PROCESS_BYTES), "big") + 1
        client = Client(self._request.address_at(*address), self._deadlines, self._world)
        with contextlib.closing(client):
            answered = False
            while (answer := self._ask(client, process)) is not None:
                answered = True
                if isinstance(answer, Role):
                    epochs = None if answer.epochs < 0 else answer.epochs
                    role = ShardRole(
                        self._shard,
                        *address,
                        answer.incarnation,
                        answer.claim,
                        answer.snapshot,
                        answer.same_attempts,
                        epochs,
                        process,
                    )
                    return self._follow_or_leave(claim, client, role), True
                require_to_stay(self._ending)
                self._world.sleep(_RETRY_SECONDS)  # another process is the shard
            return False, answered

    def _ask(self, client: Client, process: int, *, leaving: bool = False) -> Role | Ack | None:
        """Return the sequencer's answer; None if there is none, or an error, such as that another one must start."""
        try:
            return client.request(AskRole(self._shard, process, leaving), _ANSWERS, self._deadlines.handshake)
        except DistkerasError as error:
            log.debug("shard %d has no role: %s", self._shard, error.message)
            return None

    def _follow_or_leave(self, claim: Claim, client: Client, role: ShardRole) -> bool:
        """Return what `_follow` returns, and False after an error with which the next sequencer may not meet."""
        try:
            return self._follow(claim, client, role)
        except (ServerLostError, DeadlineError) as error:  # a DeadlineError: a thread still writes for this sequencer
            log.warning("shard %d leaves its sequencer: %s", role.shard, error.message)
            return False

    def _follow(self, claim: Claim, client: Client, role: ShardRole) -> bool:
        """Serve until the sequencer ends, or another one has claimed the checkpoint; return whether the job has ended.

        The role lasts as long as the connection of ``client``.
        """
        asked = self._world.monotonic()

        def keep_role(pause: float = _RETRY_SECONDS) -> None:
            nonlocal asked
            if self._world.monotonic() - asked >= pause:
                asked = self._world.monotonic()
                if not isinstance(self._ask(client, role.process), Role):
                    raise ServerLostError(f"the sequencer does not answer shard {role.shard} any more")

        request = replace(self._request, shard=role)
        server, _ = build(request, self._world, keep_role)
        with server, accompany(request, server, world=self._world):
            looked_at, left = self._world.monotonic(), False
            while not (server.over or server.corrupt):
                if self._ending() and not left:  # the sequencer ends, after a last snapshot
                    left = True
                    self._ask(client, role.process, leaving=True)
                if self._world.monotonic() - looked_at >= _LOOK_SECONDS:
                    looked_at = self._world.monotonic()
                    owner = self._owner()
                    if owner is not None and owner.claim != claim:
                        log.info("shard %d leaves its sequencer, which another one has replaced", role.shard)
                        return False
                # The sequencer ends a connection that is silent for long. After an error of the job, the shard takes no
                # more tickets, and this question is how it finds that the job is over.
                keep_role(self._deadlines.silence / 4 if server.fault is None else _RETRY_SECONDS)
                server.wait_for_change(_RETRY_SECONDS)
            return server.over
