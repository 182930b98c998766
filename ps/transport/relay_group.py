"""A worker's place in its group, whose movements reach the server as one commit.

Every worker has a separate connection to the server, for its lease, its heartbeats and its pulls; it sends its
movements to the relay of its group. The phases of an exchange:

* **Place.** Before it pulls, a worker announces itself (`server.relay_groups`) and learns which worker is its relay. It
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
"""

from __future__ import annotations

from collections.abc import Callable

from distkeras.ps.errors import RelayLostError
from distkeras.ps.protocol.companions import is_finite, join
from distkeras.ps.protocol.messages import Ack, Announce, CenterReply, Commit, Members
from distkeras.ps.transport.relay import Relay, RelayLink
from distkeras.ps.transport.worker_client import COMMITTED, WorkerClient


class RelayGroup:
    """A worker's place in its group; for the thread of its `WorkerClient`, but for `close`.

    Args:
        host: returns the address at which others reach this worker, once it has joined.
        node: the name of the host, the same for all of its workers.
        shared: exchange vectors through shared memory, if possible.
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
        timeout = client.deadlines.gather + client.deadlines.reply + client.reply_timeout
        hello = client.hello
        message = Announce(hello.worker, hello.attempt, client.incarnation, *relay.address, self._node, lost=self._lost)
        members = client.request(message, Members, timeout)
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
        """Send ``commit`` in the group's sum, and return the reply.

        Raises:
            RelayLostError: it is unknown whether the commit was applied. After the worker has joined again, that is
                final: a sum that is still in flight is refused.
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
