"""Checks of what must hold after every step of a run, under all faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import NO_ATTEMPT, PartitionLease
from distkeras.ps.center.micro_batches import NO_MICRO_BATCH, number_of
from distkeras.ps.center.schedulers import BoundedStaleness
from distkeras.ps.checkpoint.ownership import Claim, Name, parsed
from distkeras.ps.protocol.compression import FORMATS
from distkeras.ps.protocol.messages import CenterReply
from simulation.divided import Mirror, SavedStates, difference_of, mirror_for
from simulation.members import Course
from simulation.plan import Layout, Plan
from simulation.reference import Formula, Sent, Standing, close, difference, standing_of, with_other_workers
from simulation.scheduler import Finding, Process
from simulation.speed_watch import SpeedWatch
from simulation.state_watch import StateWatch
from simulation.stream_watch import StreamWatch
from simulation.tables import check_tables, rows_of, shapes_of, start_of
from simulation.value_watch import ValueWatch
from simulation.world import Surroundings, VirtualChild

#: Faults under which two processes still reach each other soon, and a disk answers.
_QUIET = {
    "kill server",
    "kill worker",
    "kill driver",
    "kill next server",
    "kill server twice",
    "rival",
    "nan",
    "speculate",
}
#: Faults under which a checkpoint may lack states of optimizers that were kept.
LOSSY_DISK = {"disk full", "disk slow", "store crawls", "snapshot rot", "log rot"}
#: Seconds until all workers must have learned that a job ends early; the second value is for a server in the cluster.
_TOLD, _TOLD_IN_CLUSTER = 5.0, 30.0
#: Seconds from an attempt's check for another one to its own claim.
_START_SECONDS = 10.0
#: The error of an element that a coarse wire format has rounded, or float32 arithmetic.
_ROUNDED, _INEXACT = 0.02, 1e-4


@dataclass
class _Standing:
    """The progress of a partition at the last check, and the attempt that had its lease."""

    position: tuple[int, int] = (0, 0)
    sequence: int = 0
    attempt: int = NO_ATTEMPT
    peer: Any = None
    refusals: int = 0


@dataclass
class _Life:
    """A server's center at the last check."""

    center: Center
    child: Any
    standings: dict[int, _Standing]
    #: The number of rows of its ledger.
    rows: int
    #: Partitions whose data has ended.
    finished: int
    holders: dict[int, Any]
    driver: Process
    formula: Formula
    #: The latest row of its ledger, as bytes.
    latest: bytes
    #: The clocks at which windows of rules that pull before they commit began, by partition.
    began: dict[int, int]
    #: The time of the first check.
    since: float
    #: The centers that workers were to receive at each clock: several, if partitions ended in between.
    views: dict[int, list[np.ndarray]]
    #: The state at the last check.
    standing: Standing
    #: The phases that its present micro-batch has passed.
    passed: set[str] = field(default_factory=set)
    #: The same center on one server, if it is divided among shards.
    mirror: Mirror | None = None

    @property
    def elements(self) -> Center:
        """Return the center that has the vectors."""
        return self.center if self.mirror is None else self.mirror.center


def _name_of(text: str) -> Name | None:
    """Return the name of a checkpoint's file or draft."""
    return parsed(text.removesuffix(".part").removesuffix(".dks"))


class Watch:
    """Checks of the server of a run.

    Args:
        plan: plan of the run.
        surroundings: surroundings of the run.
        tell: called with each line of the story.
        on_phase: called at each of `plan.PHASES`, with its name.
    """

    def __init__(
        self,
        plan: Plan,
        surroundings: Surroundings,
        tell: Callable[[str], None],
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self._plan, self._surroundings, self._tell, self.on_phase = plan, surroundings, tell, on_phase
        self._lives: dict[Center, _Life] = {}
        #: The time at which a commit was last applied.
        self.progressed = 0.0
        #: The commits that the server has promised to keep, by the numbers of layout and partition; and the workers
        #: that were
        #: let go, with their micro-batch and the number of epochs of the job.
        self.durable: dict[tuple[int, int], int] = {}
        self.let_go: dict[tuple[int, int], tuple[int, int]] = {}
        #: Whether a driver has ended the job early, and when each driver did.
        self.ends_early = False
        self._ended_early: dict[Process, float] = {}
        #: The kinds of faults that were injected.
        self.struck: set[str] = set()
        #: Whether a snapshot was damaged, so that the previous one is used.
        self.damaged = False
        #: The layout that the server of an incarnation uses.
        self.layouts: dict[int, Layout] = {}
        #: The number of epochs of a driver's job.
        self.epochs: dict[Process, int] = {}
        #: The commits of workers, by driver, incarnation, partition, attempt and number.
        self.sent: dict[tuple[Process, int, int, int, int], Sent] = {}
        #: Checks of the workers' optimizers, of their speeds, and of a stream's micro-batches.
        self.states, self.speeds = StateWatch(), SpeedWatch(plan.make_rule().window_by_speed)
        self.streams = StreamWatch(plan)
        self.values = ValueWatch()
        #: The centers that workers are to receive, by driver and incarnation.
        self._views: dict[tuple[Process, int], dict[int, list[np.ndarray]]] = {}
        #: The states of centers, by the number of rows of their ledgers and the last row.
        self._stood: dict[tuple[int, bytes], list[Standing]] = {}
        #: The claims of servers to the checkpoint.
        self._claims: dict[Process, Claim] = {}
        #: The states of divided centers that snapshots have.
        self._saved: SavedStates = {}
        #: The last ticket at which each shard was compared.
        self._compared: dict[Process, int] = {}
        #: How many shards the center of each driver's job has.
        self.shards: dict[Process, int] = {}
        #: How far each mini-batch moves its element.
        elements = np.arange(self.size)
        self.amounts = (1.0 - 0.13 * (elements % 5) * plan.rounding).astype(np.float32)
        self._coarse = plan.wire_format != FORMATS[0]
        self._views_known = plan.rule == "dana_zero" or not plan.make_rule().traits.view
        self._rule = plan.make_rule()
        self._traits = self._rule.traits
        #: The expected state of members after each step; None if workers do not exchange with each other.
        self.course = Course(plan, plan.layout(0).element, self.amounts) if self._traits.peers else None
        #: Whether the leases agree with the ledger: nothing is skipped, and all partitions are unchanged.
        self._plain = not plan.skipped and not plan.resized

    @property
    def size(self) -> int:
        """Return the number of elements of the center: one for each mini-batch, and at least one."""
        return max(1, self._plan.most_epochs * self._plan.total)

    def serves(self, driver: Process, incarnation: int) -> bool:
        """Return whether the server of an incarnation is alive."""
        lives = self._lives.values()
        return any(
            life.driver is driver and life.center.incarnation == incarnation and life.child.process.alive
            for life in lives
        )

    def end_early(self, driver: Process) -> None:
        """Record that a driver has sent its server the early end of the job."""
        self.ends_early = True
        self._ended_early[driver] = self._surroundings.scheduler.now

    def note_let_go(self, layout: Layout, worker: int, epochs: int) -> None:
        """Record that the server has let a worker go, all of whose rows are trained."""
        who = layout.number, worker
        self.let_go[who] = max((layout.micro_batch, epochs), self.let_go.get(who, (NO_MICRO_BATCH, 0)))

    def layout_of(self, row: Any) -> Layout:
        """Return the layout of the rows that a record's commit was computed from."""
        return self.streams.layout_of(row) if self._plan.stream else self.layouts[int(row["incarnation"])]

    def promise(self, layout: Layout, worker: int, sequence: int) -> None:
        """Record that the server has promised a worker that a commit survives the server."""
        who = layout.number, worker
        if sequence > self.durable.get(who, 0):
            self.durable[who] = sequence
            owner = self._owner()
            # An older server may still promise commits of a snapshot that a newer one has found damaged.
            if owner is not None and not self.damaged:
                self._require_has(owner, who)

    def note_value(self, driver: Process, incarnation: int, clock: int, value: float) -> None:
        """Record that the server has acknowledged a number that a driver has set."""
        self.values.note((driver, incarnation), clock, value)
        owner = self._owner()
        if owner is not None and not self.damaged:
            self.values.require_kept(owner)

    def _owner(self) -> Center | None:
        """Return the center of the server with the highest claim, or None if two servers claim at the same time.

        Attempts of one job leave room between their incarnations, so the claim of a later job may have a lower one.
        """
        none = Claim(0, "")
        lives = self._lives.values()
        claims = [(self._claims.get(life.child.process, none), life.center.incarnation) for life in lives]
        if any(claim is none for claim, _ in claims):
            claims = [(none, incarnation) for _, incarnation in claims]
        found = [life for life, claim in zip(lives, claims, strict=True) if claim == max(claims)]
        if len(found) > 1:
            found = [life for life in found if life.child.process.alive]
        return found[0].center if len(found) == 1 else None

    def _require_has(self, center: Center, who: tuple[int, int]) -> None:
        layout, worker = who
        if layout == self.layouts[center.incarnation].number:
            has = center.leases[worker].sequence if worker in center.leases else 0
        elif self._rule.may_refuse:
            return  # Its last commits may have been refused, so that no record has them.
        else:  # Other partitions continue the job; the records have its commits.
            has = max((int(row["sequence"]) for row in self._rows(center, *who)), default=0)
        if has < self.durable[who]:
            raise Finding(
                "lost",
                f"commit {self.durable[who]} of partition {worker} must outlive its server, as was promised. "
                f"Received: one that has {has}",
            )

    def _rows(self, center: Center, layout: int, worker: int) -> list[Any]:
        """Return the ledger's rows of one partition."""
        return [row for row in center.log.commits(0) if row["lease"] == worker and self.layout_of(row).number == layout]

    def step(self, process: Process) -> None:
        """Check the center after each step of a server's process."""
        child = self._surroundings.child_of[process]
        if getattr(child, "sequencer", None) is not None:
            self._compare(child)
        elif process.alive and child.server is not None:
            center = child.server.center
            if center is not None:
                self.look_at(child, center)

    def look_at(self, child: VirtualChild, center: Center) -> None:
        """Check everything that must hold of a center."""
        life = self._lives.get(center)
        if life is None:
            self._watch_server(child, center)
            life = self._lives[center]
        self._follow(life)
        if center.micro_batch != life.standing.numbers["micro_batch"]:
            self._begin_micro_batch(center, life)
        rows, now = center.clock + center.log.skipped + center.refused, self._surroundings.scheduler.now
        finished = sum([lease.finished for lease in center.leases.values()])
        if rows != life.rows or finished != life.finished:
            life.formula.see(center.leases, center.clock)
            if rows != life.rows:
                life.rows, self.progressed = rows, now
                self._check_rows(center, life)
                self._check_center(center)
            life.finished = finished
            self._record(center, life)
            self._note_phases(center, life)
        self.states.see(center, (life.driver, center.incarnation), (len(center.log), life.latest))
        self.speeds.see(center, life.driver)
        holders = child.server.dispatcher.connections
        if holders != life.holders:  # Each connection that acquires a lease is one join.
            life.holders = dict(holders)
            for worker, lease in center.leases.items():
                standing = life.standings.setdefault(worker, _Standing())
                if lease.attempt != standing.attempt:
                    self._check_takeover(worker, standing)
                    standing.attempt = lease.attempt
                    self._tell(f"attempt {lease.attempt} has partition {worker}")
                standing.peer = holders.get(worker)

    def _follow(self, life: _Life) -> None:
        """Make the calls at the mirror that a server with shards has decided since the last check."""
        if life.mirror is not None:
            who = life.driver, life.center.incarnation
            life.mirror.follow(life.center, lambda *commit: self.sent[(*who, *commit)])

    def _compare(self, child: VirtualChild) -> None:
        """Check that a shard has its elements of the mirror's vectors, after each ticket that it has applied."""
        assert child.sequencer is not None
        server, sequencer = child.server, child.sequencer.server
        shard = None if server is None else server.dispatcher._shard  # noqa: SLF001 - a check within
        life = None if sequencer is None or sequencer.center is None else self._lives.get(sequencer.center)
        if shard is None or life is None or life.mirror is None:
            return
        self._follow(life)  # the shard may be ahead of the next check of the sequencer
        ticket = self._compared.get(child.process, -1) + 1
        dispatcher = server.dispatcher
        stretch, cut, own = dispatcher._slice, dispatcher._cut, dispatcher._number  # noqa: SLF001 - a check within
        while ticket in shard.records:
            whole = life.mirror.at(ticket)
            text = difference_of(whole, shard.records[ticket], stretch, lambda ids: cut.owners(ids) == own)
            if text:
                raise Finding("shard", f"{child.process.name} must equal one server after ticket {ticket}. {text}")
            self._compared[child.process], ticket = ticket, ticket + 1

    def center_of(self, driver: Process) -> Center | None:
        """Return the center with the vectors of a driver's latest server; None if it has none."""
        lives = [life for life in self._lives.values() if life.driver is driver]
        return lives[-1].elements if lives else None

    def _watch_server(self, child: VirtualChild, center: Center) -> None:
        standings = {
            worker: _Standing((lease.epoch, lease.batch), lease.sequence, refusals=lease.refusals)
            for worker, lease in center.leases.items()
        }
        driver, layout = child.driver, self._surroundings.layouts[child.driver]
        # No worker of a new layout has joined; a server that continues with this layout has all joins.
        exact = center.began == (0, 0) or bool(center.scheduler.active)
        count = len(center.log)
        mirror = mirror_for(child, self.size, self._saved, start_of(shapes_of(self._plan, self.size)))
        elements = center if mirror is None else mirror.center
        life = self._lives[center] = _Life(
            center,
            child,
            standings,
            rows=center.clock + center.log.skipped + center.refused,
            finished=sum([lease.finished for lease in center.leases.values()]),
            holders={},
            driver=driver,
            formula=Formula(self._plan, center, elements, exact=exact),
            latest=center.log.commits(count - 1).tobytes() if count else b"",
            began={},
            since=self._surroundings.scheduler.now,
            views=self._views.setdefault((driver, center.incarnation), {}),
            standing=standing_of(center, elements),
            mirror=mirror,
        )
        self._follow(life)
        self.layouts[center.incarnation] = layout
        self._tell(f"{child.process.name} serves, incarnation {center.incarnation}, from clock {center.clock}")
        self.progressed = self._surroundings.scheduler.now
        if center is not self._owner():
            return  # The server is late, and will find the higher claim.
        if self.damaged:
            self._forget(center)
            self.values.forget()
        if self._plan.every:
            self.values.require_kept(center)
        for who in self.durable:
            self._require_has(center, who)
        if not self.ends_early:  # Otherwise, there is data left.
            self._require_let_go(center, self.streams.present_layout(center) if self._plan.stream else layout, driver)
        if self._plan.stream and not self.damaged:
            self.streams.require_covered(center)
        self._check_center(center)
        self._require_restored(center, life)
        self.states.see(center, (driver, center.incarnation), (count, life.latest))
        self._record(center, life)

    def _require_let_go(self, center: Center, layout: Layout, driver: Process) -> None:
        """Check that workers that were let go have ended, unless more data has been added since."""
        epochs = self.epochs[driver]
        for (number, worker), (micro_batch, trained) in self.let_go.items():
            if number != layout.number or micro_batch < layout.micro_batch or not layout.batches[worker]:
                continue
            lease = center.leases.get(worker)
            longer = trained < epochs and lease is not None and trained <= lease.epoch
            ended = lease is not None and lease.finished
            if not longer:
                ended = ended and (trained < epochs or not center.leases.owes(worker))
            if lease is None or micro_batch > layout.micro_batch or not (ended or longer):
                raise Finding("let go", f"partition {worker} was let go and must be finished. Received: it is not")

    def _begin_micro_batch(self, center: Center, life: _Life) -> None:
        """Record that the next micro-batch has begun since the last check."""
        self.streams.check_begin(center, life.elements, life.standing)
        life.formula.check(center, life.elements)
        if not self.struck and not self._plan.skipped and self._plan.keeps and not self._traits.gradient:
            self.streams.require_states(center)
        life.formula = Formula(self._plan, center, life.elements, exact=False)
        for standing in life.standings.values():
            standing.position, standing.refusals = (0, 0), 0
            standing.attempt, standing.peer = NO_ATTEMPT, None
        life.finished, life.holders, life.passed = 0, {}, set()
        self.progressed = self._surroundings.scheduler.now
        self._tell(f"micro-batch {number_of(center)} begins, from clock {center.clock}")
        self._record(center, life)

    def _note_phases(self, center: Center, life: _Life) -> None:
        """Record the progress of the present micro-batch."""
        if center.micro_batch is None:
            return
        phase = "complete" if center.leases.complete else "first commit"
        if phase not in life.passed and (phase == "complete" or center.clock > center.began[0]):
            life.passed.add(phase)
            self.on_phase(phase)

    def _require_restored(self, center: Center, life: _Life) -> None:
        """Check that a server that continues from a snapshot has the state of one that had the same ledger."""
        count, log = len(center.log), center.log
        if log.missing or not (count or center.leases):
            return
        now, epochs = standing_of(center, life.elements), self.epochs[life.driver]
        stood = self._stood.get((count, life.latest), [])
        if center.began[0] == center.clock and not any(lease.sequence for lease in center.leases.values()):
            for was in stood:
                expected, statistics = with_other_workers(was, self._plan)
                began = was.numbers["clock"] if was.total.size else was.numbers["round"][2]
                # The computed end of a round or a buffer is inexact.
                equal = close if was.total.size or "buffer" in self._traits.model_vectors else np.array_equal
                same = equal(expected, now.center) and equal(statistics, now.statistics)
                if same and now.numbers["round"][2] == began:
                    return  # With a new layout, they have nothing else in common.
            raise Finding("restored", f"a center must be restored as it was saved. Received: {now} for {stood}")
        if not self.struck & LOSSY_DISK:
            self.states.require_restored(center, (count, life.latest))
        differences = []
        for was in stood:
            again = frozenset(
                [worker for worker in was.finished - now.finished if center.leases[worker].epoch < epochs]
            )
            differences.append(difference(was, now, again))
            if not differences[-1]:
                return
        text = "; ".join(differences) or "a ledger that no server had"
        raise Finding("restored", f"a center must be restored as it was saved. Received: {text}")

    def _record(self, center: Center, life: _Life) -> None:
        """Record the present state of the center, and what a worker receives from now on."""
        life.formula.check(center, life.elements)
        standing = life.standing = standing_of(center, life.elements)
        self._stood.setdefault((len(center.log), life.latest), []).append(standing)
        if self._views_known:
            view = life.formula.view(center.clock)
            life.views.setdefault(center.clock, []).append(standing.center if view is None else view)

    def check_delivered(self, driver: Process, worker: int, reply: CenterReply, center: np.ndarray) -> None:
        """Check that a worker received what the server had at that clock."""
        views = self._views.get((driver, reply.incarnation), {}).get(reply.clock)
        if views is None:
            return
        if not any([close(view, center, coarse=self._coarse) for view in views]):
            raise Finding(
                "sent",
                f"partition {worker} must be sent {views[-1].tolist()}, the center at clock {reply.clock}. "
                f"Received: {center.tolist()}",
            )

    def _check_claim(self, process: Process) -> None:
        """Check that an attempt of a server's task does not take the job from another one that serves it."""
        child = self._surroundings.child_of.get(process)
        if not self._plan.cluster or child is None or not self.struck <= _QUIET:
            return
        for other in self._surroundings.servers:
            if other is child or other.driver is not child.driver or not other.process.alive or other.server is None:
                continue
            life = None if other.server.center is None else self._lives.get(other.server.center)
            if life is None or self._surroundings.scheduler.now - life.since < _START_SECONDS:
                continue  # Both have checked before either one claimed: the later claim counts, and nothing is lost.
            if not (other.server.superseded or other.server.corrupt or other.server.over):
                text = f"{other.process.name} serves the job. Received: a claim of {process.name}, another attempt"
                raise Finding("two servers", text)

    def wrote(self, text: str) -> None:
        """Record that the present process has written a file of the checkpoint."""
        name = _name_of(text)
        if name is not None and name.kind == "owner":
            process = self._surroundings.scheduler.current.process
            self._claims[process] = name.claim
            self._check_claim(process)
        if name is not None and name.kind == "snapshot" and self._plan.stream:
            self._note_snapshot(self._surroundings.scheduler.current.process)

    def _note_snapshot(self, process: Process) -> None:
        """Record a half-written snapshot if it is the first one that covers a micro-batch."""
        child = self._surroundings.child_of.get(process)
        center = None if child is None or child.server is None else child.server.center
        life = None if center is None else self._lives.get(center)
        if life is not None and life.center.leases.complete and "snapshot" not in life.passed:
            life.passed.add("snapshot")
            self.on_phase("snapshot")

    def check_removal(self, text: str, writer: Process | None) -> None:
        """Check that no server removes or overwrites what a server with a higher claim has written."""
        process = self._surroundings.scheduler.current.process
        child = self._surroundings.child_of.get(process)
        family = [process] if child is None else child.family
        name, own = _name_of(text), self._claims.get(family[0])
        if name is None or own is None or writer is None or writer in family or name.claim < own:
            return
        raise Finding("removed", f"{process.name} has claim {own} and must leave {text!r} alone. Received: its end")

    def _forget(self, center: Center) -> None:
        """Record that commits which the snapshot before a damaged one lacks may be lost."""
        for who in self.durable:
            lease = center.leases.get(who[1])
            self.durable[who] = min(self.durable[who], 0 if lease is None else lease.sequence)
        finished = {worker for worker, lease in center.leases.items() if lease.finished}
        self.let_go = {who: trained for who, trained in self.let_go.items() if who[1] in finished}

    def _check_rows(self, center: Center, life: _Life) -> None:
        """Check that the latest rows continue their partitions, and that the leases agree with them."""
        for number, loan in center.leases.loans():
            life.standings.setdefault(number, _Standing((loan.epoch, loan.batch), loan.sequence))
        known = [(life.standings.setdefault(worker, _Standing()), lease) for worker, lease in center.leases.items()]
        moved = sum(lease.sequence != standing.sequence and not lease.refusals for standing, lease in known)
        rows = center.log.commits(len(center.log) - moved)
        latest = {int(row["lease"]): row for row in rows}
        sents: list[tuple[Any, Sent]] = []
        for worker, lease in center.leases.items():
            standing = life.standings.setdefault(worker, _Standing())
            if lease.sequence == standing.sequence:
                continue
            if lease.refusals:
                self._check_refused(center, life, worker, lease)
                continue
            row, life.latest = latest.get(worker), rows[-1:].tobytes()
            if row is None:
                text = f"the commit of partition {worker} must be the ledger's last. Received: those of {set(latest)}"
                raise Finding("ledger", text)
            begins = (int(row["epoch"]), int(row["first_batch"]))
            if begins != standing.position or not lease.sequence == standing.sequence + 1 == row["sequence"]:
                raise Finding(
                    "ledger",
                    f"partition {worker} must continue at {standing.position} with commit {standing.sequence + 1}. "
                    f"Received: {begins} with commit {row['sequence']}, lease at {lease.sequence}",
                )
            if row["attempt"] != lease.attempt:
                raise Finding(
                    "two owners",
                    f"attempt {lease.attempt} has partition {worker}. Received: a commit of attempt {row['attempt']}",
                )
            if row["incarnation"] != center.incarnation:
                raise Finding(
                    "incarnation",
                    f"a commit must be of incarnation {center.incarnation}. Received: one of {row['incarnation']}",
                )
            sents.append((row, self._check_sent(center, life, worker, row, row if self._traits.peers else rows[0])))
            self._check_end(center, life)
            self._tell(
                f"commit {lease.sequence} of partition {worker} by attempt {lease.attempt}: epoch {row['epoch']}, "
                f"mini-batches {row['first_batch']}-{row['last_batch']}, clock {row['clock']}, "
                f"incarnation {center.incarnation}"
            )
            standing.position, standing.sequence = (lease.epoch, lease.batch), lease.sequence
            standing.refusals = 0
        if sents:
            self._apply(life, sents)

    def _apply(self, life: _Life, sents: list[tuple[Any, Sent]]) -> None:
        """Apply to the formula the commits that the center has applied since the last check."""
        if self._traits.peers:  # Each commit is applied alone.
            for row, sent in sorted(sents, key=lambda one: int(one[0]["clock"])):
                life.formula.apply([(row, sent)])
            return
        first, _ = min(sents, key=lambda one: int(one[0]["clock"]))
        if len(sents) > 1 and max(sent.began + int(first["staleness"]) for _, sent in sents) < first["clock"]:
            raise Finding("staleness", "a sum must be as stale as its stalest worker. Received: more")
        life.formula.apply(sents)

    def _check_refused(self, center: Center, life: _Life, worker: int, lease: PartitionLease) -> None:
        """Check that a commit was refused because it was too stale and not too often; its mini-batches remain."""
        standing = life.standings[worker]
        found = (lease.epoch, lease.batch), lease.sequence, lease.refusals, lease.released
        expected = standing.position, standing.sequence + 1, standing.refusals + 1, None
        sent = self.sent.pop((life.driver, center.incarnation, worker, lease.attempt, lease.sequence), None)
        if found != expected or sent is None:
            raise Finding("refused", f"partition {worker} must stand at {expected}. Received: {found}, sent: {sent}")
        staleness = center.clock - sent.began
        self._check_verdict(center, standing, staleness, refused=True)
        standing.sequence, standing.refusals = lease.sequence, lease.refusals
        self._tell(f"commit {lease.sequence} of partition {worker} is refused, with staleness {staleness}")

    def _check_sent(self, center: Center, life: _Life, worker: int, row: Any, first: Any) -> Sent:
        """Check that a commit is what its worker sent, with its window's start; ``first`` is the first row of the same
        sum.
        """
        who = life.driver, center.incarnation, worker, int(row["attempt"]), int(row["sequence"])
        sent = self.sent.pop(who, None)
        if sent is None:
            raise Finding("not sent", f"a commit must have been sent. Received: {who[1:]}")
        clock, staleness = int(first["clock"]), int(row["staleness"])
        began = sent.began if sent.first else life.began.get(worker, sent.began)
        if not self._traits.pull_first:
            began = sent.began
        # For a rule that pulls before it commits, the first pull counts, because its reply may have been lost.
        early = (self._traits.pull_first and sent.first) or clock < center.clock - 1
        right = clock - staleness <= began if early else clock - staleness == began
        if not right:
            raise Finding(
                "staleness",
                f"the window of partition {worker} began at clock {began}. "
                f"Received: staleness {staleness} at clock {clock}",
            )
        life.began[worker] = int(row["clock"]) + 1
        if isinstance(center.scheduler, BoundedStaleness):
            self._check_bound(center, center.scheduler, worker)
        if self._plan.gap and not (row["skipped"] or self._plan.overlap or self._traits.pull_first):
            self._check_gap(life, worker, first, clock - staleness)
        elif not self._plan.gap and not np.isnan(row["gap"]):
            raise Finding("gap", f"no gap is to be measured. Received: {row['gap']}")
        if self._rule.may_refuse and not row["skipped"]:
            self._check_verdict(center, life.standings[worker], staleness, refused=False)
        if not row["skipped"]:
            now = self._surroundings.scheduler.now
            self.speeds.see_commit(center, worker, int(row["steps"]), sent.times, now)
        return sent

    def _check_verdict(self, center: Center, standing: _Standing, staleness: int, *, refused: bool) -> None:
        """Check that stale commits are refused as often in a row as the rule says, and that no others are."""
        limits = self._plan.hyper_parameters
        often = limits["patience"] is not None and standing.refusals >= limits["patience"]
        if refused != (staleness >= (limits["threshold"] or 2 * center.workers) and not often):
            text = f"a commit of staleness {staleness}, after {standing.refusals} refusals in a row, must be"
            verdicts = ("applied", "refused") if refused else ("refused", "applied")
            raise Finding("refused", f"{text} {verdicts[0]}. Received: it is {verdicts[1]}")

    def _check_end(self, center: Center, life: _Life) -> None:
        """Check that a job that ends early ends, even if its server was restarted."""
        ended_at = self._ended_early.get(life.driver)
        if ended_at is None or center.stopping is not None or not self.struck <= _QUIET:
            return
        since = self._surroundings.scheduler.now - max(ended_at, life.since)
        if since > (_TOLD_IN_CLUSTER if self._plan.cluster else _TOLD):
            raise Finding("continues", f"a job that ends early must do so soon. Received: a commit after {since:.0f} s")

    def _check_gap(self, life: _Life, worker: int, row: Any, began: int) -> None:
        before, then = life.views.get(int(row["clock"])), life.views.get(began)
        if self._traits.view or not before or not then:
            return
        expected = float(np.linalg.norm((before[-1] - then[-1]).astype(np.float64))) / np.sqrt(self.size)
        if abs(expected - float(row["gap"])) > 1e-3 * (1.0 + expected):
            raise Finding(
                "gap",
                f"the gap of partition {worker} must be {expected:.6g}, since clock {began}. Received: {row['gap']}",
            )

    def _check_bound(self, center: Center, scheduler: BoundedStaleness, worker: int) -> None:
        """Check that no worker starts a window further ahead than the bound, and that the scheduler's counts are
        right.
        """
        if self.ends_early:
            return  # No worker waits for workers that have not joined.
        leases = center.leases
        windows = {other: lease.sequence for other, lease in leases.items()}
        if self._rule.may_refuse or self._plan.stream:  # A refused commit has a number, but is not a window.
            if center.log.missing:
                return
            rows = center.log.commits()
            if self._plan.stream:
                present = number_of(center)
                rows = rows[[self.layout_of(row).micro_batch == present for row in rows]]
            committed = rows["worker"]
            windows = {other: int((committed == other).sum()) for other in leases}
        begun = windows[worker] - 1
        behind = [windows[other] for other, lease in leases.items() if other != worker and not lease.finished]
        if begun - min(behind, default=begun) > scheduler.bound:
            raise Finding(
                "bound",
                f"partition {worker} must be {scheduler.bound} windows ahead at most. "
                f"Received: window {begun}, where others are at {behind}",
            )
        counted = {other: scheduler.iterations[other] for other in leases}
        if counted != windows:
            raise Finding("bound", f"the windows of all partitions must be counted. Received: {counted}")

    def _check_center(self, center: Center) -> None:
        """Check that the center's elements correspond to the applied commits."""
        array = self._lives[center].elements.current.array
        if self._plan.tables:
            check_tables(rows_of(self._lives[center].elements), array, f"at clock {center.clock}")
        if not self._plan.shows:
            return
        expected = self._by_leases(center) if self._plain else self.by_ledger(center.log.commits(0))
        # Under a rule with rounds, the center does not contain the contributions of the present one yet.
        right = self.adds_up(expected, array) if self._plan.sums else not np.any(array[expected == 0.0])
        if not right:
            raise Finding(
                "center",
                f"the center must be the sum of the ledger {expected.astype(int).tolist()}. "
                f"Received: {array.tolist()} at clock {center.clock}",
            )

    def adds_up(self, counts: np.ndarray, center: np.ndarray) -> bool:
        """Return whether ``center`` is the result of mini-batches that count so often."""
        if self._plan.rounding:
            return bool(np.all(np.abs(counts * self.amounts - center) <= (_ROUNDED if self._coarse else _INEXACT)))
        return np.array_equal(counts, center)

    def _by_leases(self, center: Center) -> np.ndarray:
        """Return how often each mini-batch counts according to the leases."""
        counts, layout = np.zeros(self.size, np.float32), self.layouts[center.incarnation]
        if self._plan.stream:
            layout = self.streams.present_layout(center)
            counts[: layout.first] = 1.0
        for lease in center.leases.values():
            begin, end = self._begin_of(lease, layout), (lease.epoch, lease.batch)
            for epoch in range(lease.epoch + 1):
                for batch in range(layout.batches[lease.partition]):
                    if begin <= (epoch, batch) < end:
                        counts[layout.element(lease.partition, epoch, batch)] += 1.0
        return counts

    @staticmethod
    def _begin_of(lease: PartitionLease, layout: Layout) -> tuple[int, int]:
        """Return the position at which a share of a partition begins."""
        epoch = int(lease.before)
        return epoch, round((lease.before - epoch) * layout.batches[lease.partition])

    def by_ledger(self, rows: np.ndarray) -> np.ndarray:
        """Return how often each mini-batch counts according to the ledger."""
        counts = np.zeros(self.size, np.float32)
        for row in rows:
            if not row["skipped"]:
                element = self.layout_of(row).element
                first, last = (
                    element(int(row["worker"]), int(row["epoch"]), int(row[name]))
                    for name in ("first_batch", "last_batch")
                )
                counts[first : last + 1] += 1.0
        return counts

    def _check_takeover(self, worker: int, standing: _Standing) -> None:
        """Raise a finding if a worker lost a partition while it was connected and its messages arrived."""
        peer = standing.peer
        if peer is None or standing.attempt == NO_ATTEMPT or peer.hung_up():
            return
        stream = peer.channel.stream
        here, there, lease = stream.process, stream.peer.process, self._plan.deadlines.lease
        since = max(here.continued, there.continued, stream.link.disturbed_until)
        disturbed = stream.link.vanished is not None or stream.peer.closed or stream.peer.shut
        if disturbed or not there.alive or there.stopped or self._surroundings.scheduler.now - since < lease:
            return
        text = f"attempt {standing.attempt} is there and has partition {worker}. Received: another one has it"
        raise Finding("takeover", text)
