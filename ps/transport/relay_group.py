"""A worker's place in its group, whose movements reach the server as one commit.

Every worker has a separate connection to the server, for its lease, its heartbeats and its pulls; it sends its
movements to the relay of its group. The phases of an exchange:

* **Place.** Before it pulls, a worker announces itself (`server.rendezvous`) and learns which worker is its relay. It
  connects to the relay, or becomes the relay.
* **Computing.** The death of a worker does not affect the others: the relay does not wait for a lost connection.
* **Sum.** The relay waits for all connected workers, for the duration of a lease at most, adds their movements in the
  order of the workers, and sends one commit. The server applies it for all workers in it or for none: each must hold
  its lease over the same connection as when it connected to the relay, and its mini-batches must be the next.
* **Applied.** The reply to the relay is the reply to all workers in the sum: the server counts their staleness from it.
* **Loss** of the relay, a connection, the server or a reply, or a refused sum. Then a worker joins the server again
  over a new connection. From then on no earlier sum with its movement can be applied, and the server reports whether
  one was: if so, the worker pulls, else it sends the same movement to the current relay. A worker that has lost its
  relay reports that, and the group gets another relay. So each movement is applied exactly once, even if processes die.
* **A movement with a NaN or infinity** is sent to the server alone, which skips it or ends the job, as without groups.
* **Leaving.** A worker whose data has ended closes its connections; if it was the relay, the others join again.

A skipped commit, a takeover and a restart of the server concern each lease separately, as without groups: if a worker
has joined again, its movement at a former relay is refused. A sum is as stale as its stalest worker: `Center.commit`.

A worker sends its relay a `Hello`, with memory that the relay maps if it can, then a `Commit` for each window. The
relay replies with the center once the sum is applied. It replies with `Waiting`, or the connection breaks, if the
worker must join the server again, which reports whether the commit was applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distkeras.ps.errors import DistkerasError, RelayLostError
from distkeras.ps.protocol.companions import Companion, is_finite, join
from distkeras.ps.protocol.framing import Allocate, EndOfStream, Limits
from distkeras.ps.protocol.messages import Ack, Announce, CenterReply, Commit, Hello, Members, Message, Waiting
from distkeras.ps.protocol.shared_slots import SharedSlots, SlotSizes
from distkeras.ps.transport.client import Channel, dial
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.handshakes import MemberListener, answer_handshake, begin_handshake
from distkeras.ps.transport.worker_client import COMMITTED, WorkerClient
from distkeras.ps.world.world import REAL, World

#: Seconds after which a wait checks whether its peers are still connected.
_LIVENESS = 1.0
#: Bytes of a commit or its reply in addition to vector and statistics, for the history.
_FRAME_ROOM = 16 * 1024 * 1024


@dataclass(eq=False)
class _Session:
    """The connection of one worker at the relay; the relay's lock guards it."""

    hello: Hello
    channel: Channel
    #: The commit that the worker has sent, until it is answered.
    commit: Commit | None = None
    answer: Message | None = None


class Relay:
    """The relay's end: collects the movements of a group, and sends the center to its workers.

    The constructor binds a port of ``host``. Every worker has a `Relay`, even if it is not the relay of its group:
    others may connect before it becomes the relay, and then wait.
    """

    def __init__(
        self,
        host: str,
        key: bytes,
        hello: Hello,
        *,
        workers: int,
        deadlines: Deadlines,
        world: World = REAL,
    ) -> None:
        self._hello, self._workers = hello, workers
        self._deadlines, self._world = deadlines, world
        self._changed = world.condition()
        self._leads = self._closed = False
        self._started = False
        #: The workers for whose movements the next sum waits.
        self._expected: set[int] = set()
        self._sessions: dict[int, _Session] = {}
        self._listener = MemberListener(host, key, deadlines, world)
        self.address = self._listener.address

    def lead(self, members: Iterable[int]) -> None:
        """Become the relay of the other workers ``members``."""
        with self._changed:
            self._leads = True
            self._expected = {*members, *self._sessions}
            self._changed.notify_all()
        if not self._started:
            self._started = True
            self._listener.start(
                self._serve,
                most=self._workers,
                limits=_limits(self._hello),
                allocate=self._memory,
            )

    def gather(self, members: Callable[[], set[int]]) -> list[Companion]:
        """Wait for the movements of the others, and return those that arrived, in the order of the workers.

        A movement that does not arrive within the duration of a lease is left out, and added to the next sum. Workers
        that have ended or died before they could connect are not waited for: ``members`` asks the server.
        """
        deadline = self._world.monotonic() + self._deadlines.lease
        while absent := self._wait_for_commits(deadline):
            gone = absent - members()
            with self._changed:
                self._expected -= gone - self._sessions.keys()
        with self._changed:
            handed = self._arrived_commits()
            self._expected = set(handed)
            return [
                Companion(self._sessions[worker].hello.connection, commit)
                for worker, commit in handed.items()
                if self._sessions[worker].answer is None
            ]

    def _wait_for_commits(self, deadline: float) -> set[int]:
        """Wait for all movements, or for the deadline; return the workers not connected after a second, if any."""
        began = self._world.monotonic()
        with self._changed:
            while True:
                self._forget_lost()
                now = self._world.monotonic()
                if self._expected <= self._arrived_commits().keys() or now >= deadline:
                    return set()
                absent = self._expected - self._sessions.keys()
                if absent and now >= began + _LIVENESS:
                    return absent
                self._changed.wait(min(deadline - now, _LIVENESS))

    def _arrived_commits(self) -> dict[int, Commit]:
        """Return the commits that have arrived, in the order of the workers; the caller holds the lock."""
        return {worker: sent.commit for worker, sent in sorted(self._sessions.items()) if sent.commit is not None}

    def answer(self, companions: Sequence[Companion], reply: CenterReply) -> None:
        """Send ``reply`` to the workers in the sum; return when all have it, and its memory may be reused."""
        with self._changed:
            answered: list[tuple[_Session, Commit]] = []
            for _, commit in companions:
                session = self._sessions.get(commit.worker)
                if session is not None and session.commit is commit:
                    # The relay does not know whether a snapshot covers the other workers' commits.
                    session.answer = replace(reply, sequence=commit.sequence, durable=0)
                    answered.append((session, commit))
            self._changed.notify_all()
            deadline = self._world.monotonic() + self._deadlines.frame
            while any(session.commit is commit for session, commit in answered):
                seconds_left = deadline - self._world.monotonic()
                if seconds_left <= 0:
                    break
                self._changed.wait(seconds_left)
            late = [session for session, commit in answered if session.commit is commit]
        for session in late:  # so that its thread stops reading the reply's memory
            session.channel.close()

    def end(self) -> None:
        """Stop being the relay: all others join the server again."""
        with self._changed:
            self._leads = False
            idle = [session for session in self._sessions.values() if session.commit is None]
            for session in self._sessions.values():
                session.answer = session.answer or Waiting()
            self._sessions = {}
            self._expected = set()
            self._changed.notify_all()
        for session in idle:
            session.channel.hang_up()

    def close(self) -> None:
        """Close all connections and the port; idempotent."""
        with self._changed:
            self._closed = True
        self.end()
        self._listener.close()

    def _serve(self, hello: Hello, channel: Channel) -> bool:
        """Serve another worker of the group until its connection ends."""
        own = self._hello
        fits = (hello.size, hello.moving_statistics) == (own.size, own.moving_statistics)
        if not fits or hello.worker == own.worker or not 0 <= hello.worker < self._workers:
            return False
        session = _Session(hello, channel)
        if not self._enter(session):
            return False
        try:
            answer_handshake(channel, hello, SlotSizes(own.size, 1), self._world)
            while self._serve_one(session):
                pass
        finally:
            with self._changed:
                session.commit = session.answer = None
                if self._sessions.get(hello.worker) is session:
                    del self._sessions[hello.worker]
                    self._expected.discard(hello.worker)
                self._changed.notify_all()
            channel.connection.share(None)
        return False

    def _enter(self, session: _Session) -> bool:
        """Wait until this worker is the relay, as the other may know before it; return whether to serve the session."""
        deadline = self._world.monotonic() + self._deadlines.handshake
        with self._changed:
            while not self._leads:
                seconds_left = deadline - self._world.monotonic()
                if seconds_left <= 0 or self._closed or session.channel.hung_up():
                    return False
                self._changed.wait(min(seconds_left, _LIVENESS))
            former = self._sessions.get(session.hello.worker)
            if former is not None and former.hello.connection > session.hello.connection:
                return False
            self._sessions[session.hello.worker] = session
            self._expected.add(session.hello.worker)
            self._changed.notify_all()
        if former is not None:
            former.channel.hang_up()
        return True

    def _serve_one(self, session: _Session) -> bool:
        """Answer one commit; return False if the connection must end."""
        message = session.channel.receive(self._deadlines.silence, "a movement of a worker of the group")
        if not isinstance(message, Commit) or message.worker != session.hello.worker:
            return False
        deadline = self._world.monotonic() + self._deadlines.silence
        with self._changed:
            if self._sessions.get(message.worker) is session:
                session.commit = message
                self._expected.add(message.worker)
                self._changed.notify_all()
            else:
                session.answer = Waiting()
            while session.answer is None:
                seconds_left = deadline - self._world.monotonic()
                if seconds_left <= 0 or self._sessions.get(message.worker) is not session:
                    return False
                self._changed.wait(min(seconds_left, _LIVENESS))
            answer = session.answer
        try:
            session.channel.send(answer)
        finally:
            with self._changed:
                session.commit = session.answer = None
                self._changed.notify_all()
        return not isinstance(answer, Waiting)

    def _forget_lost(self) -> None:
        """Remove the sessions whose workers have hung up; the caller holds the lock."""
        lost = [worker for worker, session in self._sessions.items() if session.channel.hung_up()]
        for worker in lost:
            del self._sessions[worker]
            self._expected.discard(worker)

    def _memory(self) -> Allocate:
        """Return the allocator for the arrays of one connection, which reuses the memory of the payload."""
        payload = np.empty(self._hello.size, np.float32)
        reused = payload.size != self._hello.moving_statistics

        def allocate(kind: type[Message], dtype: np.dtype, size: int) -> np.ndarray:
            if kind is Commit and reused and (dtype, size) == (payload.dtype, payload.size):
                return payload
            return np.empty(size, dtype)

        return allocate


class RelayLink:
    """The other end: a worker's connection to the relay of its group, which is authenticated with the job's key.

    A RelayLostError says that the relay cannot be reached, or does not answer.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        hello: Hello,
        *,
        shared: bool,
        allocate: Allocate,
        deadlines: Deadlines,
        world: World = REAL,
    ) -> None:
        self._deadlines = deadlines
        #: The slots for payloads, if the relay shares memory.
        self.slots: SharedSlots | None = None
        self._channel: Channel | None = None
        sizes = SlotSizes(hello.size, 1) if shared else None
        try:
            self._channel = dial(address, key, deadlines, allocate=allocate, limits=_limits(hello), world=world)
            self.slots = begin_handshake(self._channel, hello, sizes, deadlines.reply, world)
        except (DistkerasError, OSError) as error:
            self.close()
            raise _lost(error) from None

    def send_commit(self, commit: Commit) -> CenterReply | None:
        """Send a movement; return the center once it is applied, None to join again, or raise RelayLostError."""
        assert self._channel is not None, "a link must be connected"
        try:
            self._channel.send(commit)
            answer = self._channel.receive(self._deadlines.reply, f"the relay's answer to a {type(commit).__name__}")
            if isinstance(answer, EndOfStream):
                raise RelayLostError("it has closed the connection")
        except (DistkerasError, OSError) as error:
            raise _lost(error) from None
        if isinstance(answer, Waiting):
            return None
        if not isinstance(answer, CenterReply):
            raise RelayLostError(f"the relay must send the center. Received: {type(answer).__name__}")
        return answer

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


def _limits(hello: Hello) -> Limits:
    return Limits(body=4 * (hello.size + hello.moving_statistics) + _FRAME_ROOM)


def _lost(error: Exception) -> RelayLostError:
    text = error.message if isinstance(error, DistkerasError) else str(error)
    return RelayLostError(f"the relay of the worker's group is lost: {text}")


class RelayGroup:
    """A worker's place in its group, for the thread of its `WorkerClient`, but for `close`.

    ``host`` returns its address once it has joined; ``node`` names its machine; ``shared``: through shared memory.
    """

    def __init__(self, host: Callable[[], str], node: str, workers: int, *, shared: bool = True) -> None:
        self._host, self._node, self._workers, self._shared = host, node, workers, shared
        self._relay: Relay | None = None
        self._link: RelayLink | None = None
        #: The relay's line in `Members`; empty before the worker has a place.
        self._place = ""
        #: The line of a lost relay, until it is reported to the server.
        self._lost = ""

    def require_place(self, client: WorkerClient) -> None:
        """Find the relay, unless it is known, and connect to it; raise RelayLostError if it cannot be reached."""
        if self._place:
            return
        relay = self._own_relay(client)
        members = self._announce(client, relay)
        (leader, host, port), *others = members.rows(client.hello.worker)
        place = members.places.partition("\n")[0]
        if leader == client.hello.worker:
            relay.lead([number for number, _, _ in others])
        else:
            self._connect(client, place, (host, port))
        self._place = place

    def _announce(self, client: WorkerClient, relay: Relay) -> Members:
        """Announce the worker, and return its group."""
        hello = client.hello
        message = Announce(hello.worker, hello.attempt, client.incarnation, *relay.address, self._node, lost=self._lost)
        members = client.request(message, Members, client.meeting_timeout)
        self._lost = ""
        return members

    def _others(self, client: WorkerClient, relay: Relay) -> set[int]:
        """Return the other workers of the group; raise RelayLostError if another worker is its relay now."""
        (leader, _, _), *others = self._announce(client, relay).rows(client.hello.worker)
        if leader != client.hello.worker:
            raise RelayLostError("another worker is the relay of the group now", worker=client.worker)
        return {number for number, _, _ in others}

    def _own_relay(self, client: WorkerClient) -> Relay:
        if self._relay is None:
            self._relay = Relay(
                self._host(),
                client.address.key,
                client.hello,
                workers=self._workers,
                deadlines=client.deadlines,
                world=client.world,
            )
        return self._relay

    def _connect(self, client: WorkerClient, place: str, address: tuple[str, int]) -> None:
        try:
            self._link = RelayLink(
                address,
                client.address.key,
                client.hello,
                shared=self._shared,
                allocate=client.allocate,
                deadlines=client.deadlines,
                world=client.world,
            )
        except RelayLostError:
            self._lost = place
            raise
        if self._link.slots is not None:
            client.fill_payloads_in(self._link.slots)

    def send(self, client: WorkerClient, commit: Commit) -> CenterReply | Ack:
        """Send ``commit`` in the group's sum, and return the reply.

        After a RelayLostError it is unknown whether it was applied, until the worker has joined again: then a sum that
        is still in flight is refused.
        """
        if not is_finite(commit):
            self.leave()
            return client.request(commit, COMMITTED)
        self.require_place(client)
        return self._lead(client, commit) if self._link is None else self._send_commit(client, commit, self._link)

    def _send_commit(self, client: WorkerClient, commit: Commit, link: RelayLink) -> CenterReply:
        try:
            reply = link.send_commit(commit)
        except RelayLostError:
            self._lost = self._place
            raise
        if reply is None:
            raise RelayLostError("the relay of the worker's group has asked it to join again", worker=client.worker)
        return reply

    def _lead(self, client: WorkerClient, commit: Commit) -> CenterReply:
        relay = self._own_relay(client)
        try:
            companions = relay.gather(lambda: self._others(client, relay))
            parts = client.spare_payload(commit.parts) if companions else commit.parts
            reply = client.request(join(commit, companions, parts), CenterReply)
            relay.answer(companions, reply)
        except BaseException:
            relay.end()
            raise
        return reply

    def leave(self) -> None:
        """Leave the group: the others do not wait for this worker, and it is not the relay any more."""
        self._place = ""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._relay is not None:
            self._relay.end()

    def close(self) -> None:
        """Close the port and all connections; idempotent."""
        self.leave()
        if self._relay is not None:
            self._relay.close()
