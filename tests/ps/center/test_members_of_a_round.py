"""Members that exchange with each other: they are asked to leave after the same round, and none is forgotten."""

from __future__ import annotations

from support.ps.virtual_centers import center_of, commit_of, joined, send

from distkeras.ps.protocol.messages import Announce, Members
from distkeras.ps.rules import make
from distkeras.ps.server.job_state import JobCondition
from distkeras.ps.server.rendezvous import Rendezvous
from distkeras.ps.settings import ServerSettings


def test_all_members_are_asked_to_leave_by_the_same_round() -> None:
    """A member that left within a round would be missed by those that have had their reply."""
    center = center_of("daso")
    joined(center, 0)
    joined(center, 1)
    send(center, commit_of(0))
    send(center, commit_of(1))
    assert not center.asks_workers_to_leave
    center.end_early("enough")
    assert not center.asks_workers_to_leave  # the replies of the round that has ended
    send(center, commit_of(0, sequence=2, first=1, last=1))
    assert not center.asks_workers_to_leave
    send(center, commit_of(1, sequence=2, first=1, last=1))
    assert center.asks_workers_to_leave


def test_an_unanswered_announcement_counts_for_the_next_membership() -> None:
    """Its sender still waits for the reply and does not announce itself again."""
    changed = JobCondition()
    rendezvous = Rendezvous(ServerSettings(make("daso"), workers=2), changed, lambda worker: 0.0)
    answered, waiting = (Announce(worker, 0, 1, "127.0.0.1", 7000 + worker, "node") for worker in (0, 1))
    # The membership is complete, and worker 1 has not been woken yet, when worker 0 announces itself again.
    rendezvous._announced = {0: answered, 1: waiting}  # noqa: SLF001 - the moment lies between two threads
    rendezvous._unanswered = {1: waiting}  # noqa: SLF001 - the same
    rendezvous._members = Members("", 2, 1)  # noqa: SLF001 - the same
    with changed:
        rendezvous._end_membership()  # noqa: SLF001 - the same
    assert rendezvous._announced == {1: waiting}  # noqa: SLF001 - the same
