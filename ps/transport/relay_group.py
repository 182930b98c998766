"""A worker's place in its group, whose movements reach the server as one commit.

Every worker keeps a connection of its own to the server, for its lease, its heartbeats and its pulls; what it computes
goes to the relay of its group. The protocol, which is that of one worker with a detour:

* **Place.** Before it pulls, a worker announces itself (`server.relay_groups`) and learns who its relay is. It connects
  to it, or leads.
* **Computing.** A death has no consequence for the others: the relay does not wait for one whose connection has ended.
* **Handed over.** The relay waits for all workers that are connected, for a lease at most, adds up what it has in the
  order of the workers, and sends one commit. The server applies it for all in it or for none: each must hold its lease,
  over the connection to the server that it had when it connected to the relay, and its mini-batches must be the next.
* **Applied.** The reply to the relay is the reply to all in the sum: the server counts their staleness from it.
* **Something is lost** (the relay, a connection, the server, the answer), or the server refuses the sum. Then a worker
  joins the server again over a new connection. From that moment on no earlier sum can be applied with its movement,
  and the server says whether it was: then the worker pulls, else it hands the same movement to the relay of that
  moment. One that has lost its relay reports that, and a relay that is lost to one of its workers is followed by
  another one. So each movement counts once, wherever and whenever a process dies.
* **A movement with a NaN or infinity** goes to the server alone, which skips it or ends the job, as without groups.
* **Leaving.** A worker whose data has ended closes its connections; where it was the relay, the others join again.

A skipped commit, a takeover and a server that was restarted concern one lease each, as without groups: what a relay
holds of a worker that has begun again is refused. A sum is as stale as its stalest worker: `Center.commit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from distkeras.ps.errors import RelayLostError
from distkeras.ps.protocol.companions import is_finite, join
from distkeras.ps.protocol.messages import Ack, Announce, CenterReply, Commit, Members
from distkeras.ps.transport.relay import Relay, RelayLink

#: What answers a commit.
COMMITTED: tuple[type[CenterReply | Ack], ...] = (CenterReply, Ack)

if TYPE_CHECKING:
    from distkeras.ps.transport.worker_client import WorkerClient


class RelayGroup:
    """A worker's place in its group; for the thread of its `WorkerClient`, but for `close`.

    Args:
        host: returns where others reach this worker, once it has joined.
        node: what the workers of one host have in common.
        shared: exchange vectors through memory that both ends map, where that works.
    """

    def __init__(self, host: Callable[[], str], node: str, workers: int, *, shared: bool = True) -> None:
        self._host, self._node, self._workers, self._shared = host, node, workers, shared
        self._relay: Relay | None = None
        self._link: RelayLink | None = None
        #: The line of `Members` of the relay; empty before the worker has a place.
        self._place = ""
        #: That of a relay that is lost, until the server knows.
        self._lost = ""

    def require_place(self, client: WorkerClient) -> None:
        """Find the relay, unless it is known; ``client`` has joined. Raise RelayLostError if it cannot be reached."""
        if self._place:
            return
        relay = self._own_relay(client)
        members = self._announce(client, relay)
        (leader, host, port), *others = members.rows(client.hello.worker)
        place = members.places.partition("\n")[0]
        if leader == client.hello.worker:
            relay.lead([number for number, _, _ in others], whole=members.whole)
        else:
            self._connect(client, place, (host, port))
        self._place = place

    def _announce(self, client: WorkerClient, relay: Relay) -> Members:
        """Return the worker's group as the server has it now."""
        timeout = client.deadlines.gather + client.deadlines.reply + client.reply_timeout
        hello = client.hello
        message = Announce(hello.worker, hello.attempt, client.incarnation, *relay.address, self._node, lost=self._lost)
        members = client.request(message, Members, timeout)
        self._lost = ""
        return members

    def _others(self, client: WorkerClient, relay: Relay) -> set[int]:
        """Return the other workers of the group that this worker leads, or raise RelayLostError: another one does."""
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
                parts=1,
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
                parts=1,
                shared=self._shared,
                allocate=client.memory_of_replies,
                deadlines=client.deadlines,
                world=client.world,
            )
        except RelayLostError:
            self._lost = place
            raise
        if self._link.slots is not None:
            client.fill_payloads_in(self._link.slots)

    def send(self, client: WorkerClient, commit: Commit) -> CenterReply | Ack:
        """Have ``commit`` applied with those of the group, and return the answer.

        Raises:
            RelayLostError: it is not known whether it is applied, and it is so by no message that is on its way once
                the worker has joined again.
        """
        if not is_finite(commit):
            self.leave()
            return client.request(commit, COMMITTED)
        self.require_place(client)
        return self._lead(client, commit) if self._link is None else self._hand(client, commit, self._link)

    def _hand(self, client: WorkerClient, commit: Commit, link: RelayLink) -> CenterReply:
        try:
            reply = link.hand(commit)
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
        """Give the place up: the others do not wait for this worker, and its relay leads no more."""
        self._place = ""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._relay is not None:
            self._relay.end()

    def close(self) -> None:
        """Close the port and all connections; may be called again."""
        self.leave()
        if self._relay is not None:
            self._relay.close()
