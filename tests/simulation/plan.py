"""The plan of a run: a job and its faults, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from distkeras.ps import rules
from distkeras.ps.center.micro_batches import NO_MICRO_BATCH
from distkeras.ps.checkpoint.state import checksum_of, sum_of
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.compression import FORMATS, require_format
from distkeras.ps.rules import Rule
from distkeras.ps.rules.base import AUTO, BY_SPEED
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.validate import reason_against
from simulation.network import SHARD
from simulation.outer import BUFFERED

#: Kinds of faults with the range of their amount: seconds, or a share of a write.
KINDS: dict[str, tuple[float, float]] = {
    "cut": (0.0, 1.0),
    "half cut": (0.02, 4.0),
    "vanish": (0.0, 0.0),
    "stall": (0.1, 20.0),
    "flip": (0.0, 1.0),
    "part": (1.0, 20.0),
    "kill server": (0.0, 0.0),
    "kill worker": (0.0, 0.0),
    "kill sender": (0.0, 0.0),
    "power cut": (0.0, 0.0),
    "crash in disk": (1.0, 12.0),
    "stop server": (0.5, 600.0),
    "stop worker": (1.0, 90.0),
    "stop driver": (0.5, 15.0),
    "rival": (0.0, 0.0),
    "stop and rival": (1.0, 90.0),
    "disk full": (1.0, 20.0),
    "disk slow": (0.02, 2.0),
    "store crawls": (15.0, 18.0),
    "no memory": (1.0, 6.0),
    "clock jump": (-4000.0, 4000.0),
    "slow start": (1.0, 12.0),
    "kill driver": (0.0, 8.0),
    "second driver": (0.0, 8.0),
    "kill server twice": (0.0, 3.0),
    "kill next server": (0.4, 4.0),
    "kill driver twice": (0.0, 8.0),
    "stop at start": (1.0, 200.0),
    "impostor": (0.5, 20.0),
    "snapshot rot": (0.0, 1.0),
    "log rot": (0.0, 1.0),
    "nan": (0.0, 0.0),
    "speculate": (0.0, 0.0),
    "kill shard": (0.0, 0.0),
    "stop shard": (0.5, 90.0),
}
#: Moments of a micro-batch in their order, with the kinds of faults that occur there: Spark has handed it over; its
#: tasks
#: start; its first commit is applied; all of its partitions have ended; a snapshot that covers it is half written; its
#: tasks have returned; its records are checked; Spark has recorded that it is done.
PHASES: dict[str, tuple[str, ...]] = {
    "offered": ("kill server", "kill driver"),
    "begun": ("kill worker", "kill server", "kill driver"),
    "first commit": ("kill worker", "kill server", "kill driver", "stop and rival"),
    "complete": ("kill worker", "kill server", "kill driver"),
    "snapshot": ("kill worker", "kill server", "kill driver", "power cut"),
    "trained": ("kill server", "kill driver"),
    "checked": ("kill server", "kill driver"),
    "noted": ("kill server", "kill driver", "power cut"),
}
#: Kinds that end a server, with the number of deaths.
DEATHS = {
    "kill server": 1,
    "kill sender": 1,
    "power cut": 1,
    "crash in disk": 1,
    "kill driver": 1,
    "kill server twice": 2,
    "kill next server": 2,
    "kill driver twice": 2,
    "stop at start": 1,
    "impostor": 1,
    "kill shard": 1,
}
#: Kinds that are drawn only for the jobs that they fit.
_SPECIAL = ("speculate", "kill shard", "stop shard")
#: Kinds that strike the connections of shards with their server, after which another server begins.
_OF_LINKS = ("cut", "half cut", "vanish", "stall", "flip")
#: Kinds that suspend a worker.
_STOP_WORKERS = ("stop worker", "stop and rival")
#: Kinds after which only a job with a checkpoint can continue.
NEED_CHECKPOINT = (*DEATHS, "second driver")


#: Deadlines that are short, but in the proportions of the real ones.
DEADLINES = Deadlines(
    connect=10.0,
    handshake=5.0,
    frame=30.0,
    publish=60.0,
    gather=120.0,
    reply=200.0,
    lease=24.0,
    silence=2000.0,
    reconnect=60.0,
    rows=600.0,
    close=10.0,
    standstill=40.0,
)


@dataclass(frozen=True)
class Fault:
    """A fault that occurs at a send.

    Args:
        kind: one of `KINDS`.
        at: number of the send, counted from 1 in its scope.
        scope: "" for any connection, "driver", "w" and a partition's number, or "shard" for those of shards with their
            server; or one of `PHASES`, which are counted in place of sends.
        amount: seconds, or the share of the write that arrives.
        place: a partition or a shard, for kinds that strike one.
    """

    kind: str
    at: int
    scope: str = ""
    amount: float = 0.0
    place: int = 0

    def __str__(self) -> str:
        what = f"at {self.scope!r} {self.at}" if self.scope in PHASES else f"at send {self.at}"
        where = f" of {self.scope}" if self.scope and self.scope not in PHASES else ""
        return f"{what}{where}: {self.kind} ({self.amount:.3g}, partition {self.place})"


class Layout(NamedTuple):
    """The mini-batches of each partition.

    Args:
        number: number of this layout in a run.
        batches: mini-batches of each partition in an epoch.
        micro_batch: number of the stream's micro-batch that has the rows; -1 if the job trains no stream.
        first: element of its first mini-batch.
        rows: number of its first row, which identifies the rows.
    """

    number: int
    batches: tuple[int, ...]
    micro_batch: int = NO_MICRO_BATCH
    first: int = 0
    rows: int = 0

    def element(self, worker: int, epoch: int, batch: int) -> int:
        """Return the element of the center that counts a mini-batch; it is the same in each layout of the data."""
        return self.first + epoch * sum(self.batches) + sum(self.batches[:worker]) + batch

    def checksum(self, worker: int, batch: int) -> int:
        """Return the checksum of a partition's rows up to a mini-batch, as a server keeps it."""
        firsts = self.rows + sum(self.batches[:worker])
        numbers = range(firsts, firsts + batch + 1)
        return checksum_of(sum(_WEIGHT * (number + 1) for number in numbers), numbers.stop)

    def row_sum(self) -> int:
        """Return the checksum of all rows, however they are distributed."""
        return sum_of([checksum_of(sum(_WEIGHT * (number + 1) for number in range(sum(self.batches))), 0)])


#: The difference between the numbers of a life's rows and those of the previous life, if they differ.
_OTHER_ROWS = 10_000
#: The factor in the hash of a mini-batch's rows, which is its number (from 1) times this.
_WEIGHT = 1_000_003


@dataclass(frozen=True)
class Plan:
    """The plan of one run.

    Args:
        seed: seed of every choice while it runs.
        workers, epochs: numbers of workers and epochs of the job.
        batches: mini-batches of each partition in an epoch.
        rule, hyper_parameters, learning_rate: rule and rate of the job.
        overlap, wire_format, tls: how the job's workers exchange vectors with the server.
        compute: seconds of a step; ``long`` of them take several leases.
        every, keep: settings of the checkpoint; there is none if ``every`` is 0.
        latency, fragmenting, capacity, yielding, disk: settings of the surroundings.
        skipped: commits with a NaN that are skipped before another one ends the job.
        bound: iterations that a worker may be ahead of the slowest; None if there is no bound.
        enough: clock at which the driver ends the job early; 0 if it does not.
        resized: mini-batches of each partition when another driver continues; empty if they do not change.
        raised: epochs that are added to the job when another driver continues.
        stream: mini-batches of each partition in each micro-batch; empty if the job trains no stream.
        altered: whether the stream sends each driver other rows.
        statistics: number of elements of the moving statistics.
        rounding: whether mini-batches move their elements by different amounts, which a coarse wire format rounds.
        gap: whether the server measures the gap of each commit.
        cluster: whether the server is a task in the cluster instead of the driver's child process.
        lists: whether the driver requests the table of workers at intervals.
        sets: whether the driver sets a number for the workers at intervals.
        keeps: whether states of the workers' optimizers are kept.
        tables: whether tables travel by rows, next to the center's vector.
        visits: whether one of the tables has rows that are admitted, expire, and are removed by the driver.
        neighbors: number of the first workers that are on the server's host and share memory with it; all workers
            offer to, unless it is 0.
        relays: number of groups of workers, whose relays send their commits; 0 if each worker sends its own.
        hosts: number of hosts of the workers of a rule with peers, in turns; 0 if the rule defines the nodes.
        lends: whether workers without work train mini-batches of others.
        helpers: number of workers without rows, if workers lend.
        slow: how many times longer a step takes at each worker; empty if all are equally fast.
        shards: servers among which the center is divided.
        reshards: this number for the drivers after the first one; 0 if it does not change.
        stray: whether a file that is no snapshot lies in the directory of the snapshots.
        deadlines: deadlines of every wait.
        faults: faults in any order.
    """

    seed: int
    workers: int = 2
    epochs: int = 1
    batches: tuple[int, ...] = (4, 4)
    rule: str = "downpour"
    hyper_parameters: dict[str, Any] = field(default_factory=dict)
    learning_rate: float | dict[str, Any] | None = None
    overlap: bool = False
    wire_format: str = "float32"
    tls: bool = False
    compute: float = 0.5
    long: float = 0.0
    every: int = 2
    keep: int = 3
    latency: float = 0.002
    fragmenting: float = 0.1
    capacity: int = 1 << 20
    yielding: float = 0.1
    disk: float = 0.002
    skipped: int = 0
    bound: int | None = None
    enough: int = 0
    resized: tuple[int, ...] = ()
    raised: int = 0
    stream: tuple[tuple[int, ...], ...] = ()
    altered: bool = False
    statistics: int = 0
    rounding: bool = False
    gap: bool = False
    lists: bool = False
    sets: bool = False
    cluster: bool = False
    stray: bool = False
    keeps: bool = False
    tables: bool = False
    visits: bool = False
    neighbors: int = 0
    relays: int = 0
    hosts: int = 0
    lends: bool = False
    helpers: int = 0
    slow: tuple[int, ...] = ()
    shards: int = 1
    reshards: int = 0
    deadlines: Deadlines = field(default_factory=lambda: DEADLINES)
    faults: tuple[Fault, ...] = ()

    def layout(self, life: int) -> Layout:
        """Return the layout of the driver with this number, from 0."""
        return Layout(1, self.resized) if life and self.resized else Layout(0, self.batches)

    def micro_batch(self, number: int, life: int = 0) -> Layout:
        """Return the rows of a micro-batch as the driver with this number receives them."""
        before = sum(map(sum, self.stream[:number]))
        rows = before + (_OTHER_ROWS * life if self.altered else 0)
        return Layout(0, self.stream[number], number, self.epochs * before, rows)

    @property
    def total(self) -> int:
        """Return the number of mini-batches of an epoch; for a stream, of one epoch of each micro-batch."""
        return sum(map(sum, self.stream)) if self.stream else sum(self.batches)

    def epochs_of(self, life: int) -> int:
        """Return the number of epochs of the job that the driver with this number trains."""
        return self.epochs + (self.raised if life else 0)

    def shards_of(self, life: int) -> int:
        """Return the number of shards of the driver with this number."""
        return self.reshards or self.shards if life else self.shards

    @property
    def divided(self) -> bool:
        """Return whether some driver's center is divided."""
        return max(self.shards, self.reshards) > 1

    @property
    def most_epochs(self) -> int:
        """Return the number of epochs of the longest job."""
        return self.epochs + self.raised

    @property
    def long_step(self) -> float:
        """Return the seconds of a long step."""
        return 3.0 * self.deadlines.lease

    def make_rule(self) -> Rule:
        """Return the update rule."""
        return rules.make(self.rule, **self.hyper_parameters)

    @property
    def sums(self) -> bool:
        """Return whether the center counts how often each mini-batch was applied."""
        return self.rule in ("downpour", "asgd")

    @property
    def shows(self) -> bool:
        """Return whether the center shows which mini-batches were applied, when their round is over."""
        return self.sums or self.rule == "ssgd"


def draw(seed: int, *, kinds: tuple[str, ...] = tuple(KINDS), shards: float = 0.5) -> Plan:
    """Draw the plan of ``seed``; a share ``shards`` of the jobs whose center may be divided have shards."""
    plan = _draw(seed, kinds)
    chance = random.Random(f"the shards of {seed}")
    return _with_shards(plan, chance, kinds) if chance.random() < shards and _may_have_shards(plan) else plan


def _may_have_shards(plan: Plan) -> bool:
    """Return whether the center of ``plan`` may be divided."""
    options = {"measure_gap": plan.gap, "relays": plan.relays or None}
    rate = None if plan.learning_rate is None else 1.0
    settings = partial(ServerSettings, plan.make_rule(), plan.workers, learning_rate=rate, shards=2)
    # The simulated Spark has no tasks of shards.
    return not plan.cluster and reason_against("shards", **options) is None and _goes(settings)


def _with_shards(plan: Plan, chance: random.Random, kinds: tuple[str, ...]) -> Plan:
    """Return ``plan`` with a center that is divided among shards, at the first or at later drivers, and their faults.

    More of these jobs have tables, as few rules allow both.
    A connection of a shard with its server breaks only where a fault says so, because they are on one host.
    """
    shards, faults = chance.choice((1, 2, 2, 3)), list(plan.faults)
    reshards = chance.choice([other for other in (1, 2, 3) if other != shards])
    again = plan.every and (shards == 1 or chance.random() < 0.3)
    for _ in range(chance.choice((0, 0, 1, 1, 2)) if plan.every else 0):
        kind = chance.choice(("kill shard", "kill shard", "stop shard", "stop shard", *_OF_LINKS))
        low, high = KINDS[kind]
        scope = SHARD if kind in _OF_LINKS else chance.choice(("", "", SHARD, "driver"))
        at, amount = 1 + int(chance.random() * (150 if scope == "" else 60)), low + (high - low) * chance.random() ** 2
        faults.append(Fault(kind, at, scope, amount, chance.choice((0, 1, 2))))
    survivable = _survivable([fault for fault in faults if fault.kind in kinds], standstills=plan.every > 0)
    tables = plan.tables or (_may_have_tables(plan) and not plan.stream and chance.random() < _DIVIDED_TABLES)
    plan = replace(plan, tables=tables, visits=tables and chance.random() < _VISITS)
    if again:
        return replace(plan, shards=shards, reshards=reshards, faults=survivable)
    return replace(plan, shards=max(2, shards), faults=survivable)


def _draw(seed: int, kinds: tuple[str, ...]) -> Plan:
    chance = random.Random(seed)
    workers = chance.choice((1, 2, 2, 3, 3))
    epochs = chance.choice((1, 1, 2))
    rule, hyper_parameters, rate = chance.choice(_RULES)
    batches = tuple(chance.choice((0, 1, 2, 3, 4, 5, 6)) for _ in range(workers))
    overlap = rule == "downpour" and chance.random() < 0.3
    formats = ("float32",) * 4 + (("bfloat16", "int8") if rule == "downpour" else ())
    every = 0 if chance.random() < 0.12 else chance.choice((1, 2, 3, 5, 100))
    long = chance.choice((0.0, 0.0, 0.0, 0.1, 0.3))
    possible = [kind for kind in kinds if (every or kind not in NEED_CHECKPOINT) and kind not in _SPECIAL]
    enabled = tuple(chance.sample(possible, min(len(possible), chance.choice((1, 2, 2, 3, 4, 8)))))
    focus = f"w{int(chance.random() * workers)}" if chance.random() < 0.5 else ""
    count = chance.choice((0, 1, 2, 3, 4, 6, 8)) if enabled else 0
    drawn = [_fault(chance, enabled, focus, workers) for _ in range(count)]
    if chance.random() < 0.4:
        drawn = _combined_faults(chance, kinds, workers) or drawn
    faults = _survivable(
        [fault for fault in drawn if every or fault.kind not in NEED_CHECKPOINT], standstills=every > 0
    )
    struck = {fault.kind for fault in faults}
    damage = struck & {"snapshot rot", "log rot"}
    # A worker that is held back waits for windows of others, and long windows outlast its deadline.
    paced = rule in _PACED and not long
    resized = _dealt(chance, batches) if every and not damage and chance.random() < 0.25 else ()
    paced = paced and not resized
    tls = chance.random() < 0.02  # The sizes of its records are random, since nothing may depend on them.
    plan = Plan(
        seed=seed,
        workers=workers,
        epochs=epochs,
        batches=batches,
        rule=rule,
        hyper_parameters=hyper_parameters,
        learning_rate=rate,
        overlap=overlap,
        wire_format=chance.choice(formats),
        compute=chance.choice((0.01, 0.1, 1.0, 3.0)),
        long=long,
        every=every,
        keep=chance.choice((1, 2, 3)),
        latency=chance.choice((0.0005, 0.005, 0.1)),
        tls=tls,
        fragmenting=0.0 if tls else chance.choice((0.0, 0.1, 0.5)),
        capacity=1 << 20 if tls else chance.choice((64, 1024, 1 << 20, 1 << 20)),
        yielding=chance.choice((0.0, 0.05, 0.3)),
        disk=chance.choice((0.0005, 0.01, 0.1)),
        skipped=chance.choice((0, 1, 3)) if not damage and chance.random() < 0.5 else 0,
        bound=chance.choice((0, 1, 2)) if paced and chance.random() < 0.2 else None,
        enough=1 + int(8 * chance.random()) if chance.random() < 0.1 else 0,
        resized=resized,
        stray=chance.random() < 0.1,
        faults=faults,
    )
    plan = _with_options(plan, random.Random(f"the options of {seed}"), damage=bool(damage))
    plan = _as_stream(plan, random.Random(f"the stream of {seed}"), kinds)
    if plan.stream:
        return plan
    plan = _with_peers(plan, kinds)
    return _with_lending(plan, random.Random(f"the loans of {seed}"))


def _with_peers(plan: Plan, kinds: tuple[str, ...]) -> Plan:
    """Draw whether the workers of ``plan`` have relays or exchange with each other; return the new plan."""
    plan = _with_relays(plan, random.Random(f"the relays of {plan.seed}"))
    chance = random.Random(f"the members of {plan.seed}")
    return _as_members(plan, chance, kinds) if chance.random() < _MEMBERS else plan


def draw_members(seed: int, *, kinds: tuple[str, ...] = tuple(KINDS)) -> Plan:
    """Draw the plan of ``seed`` as if all jobs had members."""
    return _as_members(_draw(seed, kinds), random.Random(f"all members of {seed}"), kinds)


def _as_stream(plan: Plan, chance: random.Random, kinds: tuple[str, ...]) -> Plan:
    """Draw whether ``plan`` is a stream of micro-batches with faults in their phases; return the new plan."""
    if chance.random() >= _STREAMS:
        return plan
    stream = tuple(
        tuple(chance.choice((0, 1, 1, 2, 3)) for _ in range(plan.workers))
        for _ in range(chance.choice((2, 3, 3, 4, 5)))
    )
    faults = []
    for _ in range(chance.choice((0, 1, 1, 2, 2, 3))):
        phase = chance.choice(tuple(PHASES))
        kind = chance.choice(PHASES[phase])
        low, high = KINDS[kind]
        amount = low + (high - low) * chance.random() ** 2
        place = int(chance.random() * plan.workers)
        faults.append(Fault(kind, 1 + int(chance.random() * (len(stream) + 1)), phase, amount, place))
    # Spark allows only one query at a time for a checkpoint.
    others = [fault for fault in plan.faults if fault.kind not in ("second driver", "speculate")]
    damage = any(fault.kind in ("snapshot rot", "log rot") for fault in others)
    return replace(
        plan,
        stream=stream,
        batches=stream[0],
        altered=not damage and chance.random() < _ALTERED,
        every=plan.every or chance.choice((1, 2, 5, 100)),
        enough=0,
        resized=(),
        raised=0,
        cluster=False,
        tables=False,
        faults=_survivable([fault for fault in (*faults, *others) if fault.kind in kinds], standstills=True),
    )


def _with_relays(plan: Plan, chance: random.Random) -> Plan:
    """Draw whether ``plan`` has relays, if its rule allows them, instead of the options that exclude them."""
    rule = plan.make_rule()
    if plan.tls or not rule.traits.sums or not isinstance(rule.window, int) or chance.random() >= _RELAYS:
        return plan
    plain: dict[str, Any] = {"overlap": False, "wire_format": FORMATS[0], "tables": False, "bound": None}
    return replace(plan, relays=chance.choice((1, 1, 2)), **plain)


def _with_lending(plan: Plan, chance: random.Random) -> Plan:
    """Draw whether the workers of ``plan`` lend, if its options allow it; partitions are larger then."""
    possible = plan.make_rule().traits.lends and plan.bound is None and not plan.relays and not plan.tls
    return as_lending(plan, chance) if possible and chance.random() < _LENDS else plan


def as_lending(plan: Plan, chance: random.Random) -> Plan:
    """Return ``plan`` with workers that lend."""
    batches = tuple(chance.choice((0, 2, 6, 12, 20)) for _ in plan.batches)
    return replace(
        plan,
        lends=True,
        helpers=chance.choice((0, 0, 1, 2)),
        batches=batches,
        slow=tuple(chance.choice((1, 1, 4)) for _ in batches),
        resized=_dealt(chance, batches) if plan.resized else (),
        compute=chance.choice((0.2, 1.0)),
        capacity=max(plan.capacity, 1024),  # The records of so many mini-batches would take too long.
    )


def _as_members(plan: Plan, chance: random.Random, kinds: tuple[str, ...]) -> Plan:
    """Return a job of DASO in the surroundings of ``plan``, with its own faults."""
    nodes, devices = chance.choice(((1, 2), (2, 1), (2, 2), (2, 2), (3, 1), (3, 2)))
    hosts, warm_up, cool_down = chance.choice((0, nodes)), chance.choice((0, 1)), chance.choice((0, 1))
    interval = chance.choice((1, 2, 3, 4))
    hyper_parameters = {
        "nodes": None if hosts else nodes,
        "interval": interval,
        "wait": chance.choice((None, interval)),
        "warm_up": warm_up,
        "cool_down": cool_down,
        "momentum": chance.choice((0.0, 0.5)),
        "cast": chance.random() < 0.5,
        "patience": 1,
    }
    possible = [kind for kind in kinds if (plan.every or kind not in NEED_CHECKPOINT) and kind not in _SPECIAL]
    count = chance.choice((0, 0, 1, 1, 2, 3)) if possible else 0
    faults = []
    for fault in [_fault(chance, tuple(possible), "", nodes * devices) for _ in range(count)]:
        faults.append(replace(fault, at=1 + int(chance.random() * (60 if fault.scope else 250))))
    return replace(
        Plan(plan.seed),
        workers=nodes * devices,
        epochs=max(1, warm_up + cool_down + chance.choice((0, 1, 2, 4))),
        batches=tuple(chance.choice((1, 2, 3, 3)) for _ in range(nodes * devices)),
        rule="daso",
        hyper_parameters=hyper_parameters,
        hosts=hosts,
        compute=chance.choice((0.01, 0.1, 1.0)),
        enough=chance.choice((1, 5)) if chance.random() < 0.1 else 0,
        faults=_survivable(faults, standstills=plan.every > 0),
        neighbors=chance.choice((0, 2, 9)),
        **{name: getattr(plan, name) for name in _OF_MEMBERS},
    )


def _with_options(plan: Plan, chance: random.Random, *, damage: bool) -> Plan:  # noqa: C901 - an `if` an option
    """Draw another rule for some of the plans, and options that fit the rule; return the new plan.

    They are drawn from a separate random generator, so that a new option does not change jobs and faults.
    """
    if chance.random() < _OTHER_RULES:
        plan = _with_other_rule(plan, chance)
    rule = plan.make_rule()
    drawn: dict[str, Any] = {}
    if plan.wire_format == "float32" and chance.random() < 0.15:
        drawn["wire_format"] = chance.choice([name for name in FORMATS if _goes(lambda: require_format(name, rule))])  # noqa: B023 - called at once
    coarse = drawn.get("wire_format", plan.wire_format) != FORMATS[0]
    drawn["rounding"] = chance.random() < (0.8 if coarse else 0.1)
    measured = not rule.traits.grows and _goes(lambda: replace(rule, window=AUTO))
    if not plan.long and measured and chance.random() < 0.15:
        drawn["hyper_parameters"] = {**plan.hyper_parameters, "window": AUTO}
    if plan.learning_rate is not None and not (plan.sums or plan.shows) and chance.random() < 0.4:
        drawn["learning_rate"] = {"rate": plan.learning_rate, **chance.choice(_SCHEDULES)}
    drawn["statistics"] = chance.choice((0, 0, 1, 2))
    # One draw more than options: with one less, all later draws would be others, and so would the known stories.
    drawn["gap"], _, drawn["lists"] = (chance.random() < 0.1 for _ in range(3))
    if plan.every and not damage and chance.random() < 0.2:
        drawn["raised"] = chance.choice((1, 2))
        if not plan.resized and chance.random() < 0.6:  # One partition ends long before the others.
            drawn["batches"] = (min(1, plan.batches[0]), *plan.batches[1:])
        faults = list(plan.faults)
        at = 10 + int(150 * chance.random())
        for kind in ("kill driver", "kill next server"):
            if chance.random() < 0.6:
                low, high = KINDS[kind]
                faults.append(Fault(kind, at, amount=low + (high - low) * chance.random() ** 2))
                at -= 1
        drawn["faults"] = _survivable(faults, standstills=True)
    if plan.every and not damage and chance.random() < 0.06:
        # The job ends early and its server dies, and the next server must also receive the early end.
        drawn |= {"enough": chance.choice((1, 2)), "compute": 3.0}
        drawn["faults"] = (Fault("kill server", 15 + int(60 * chance.random())),)
    plan = replace(plan, **drawn)
    plan = _in_cluster(plan, chance) if plan.every and not damage and chance.random() < _CLUSTER else plan
    plan = replace(plan, keeps=chance.random() < 0.75)
    if plan.hyper_parameters.get("window") != AUTO and chance.random() < _BY_SPEED:
        paced = {**plan.hyper_parameters, "window": BY_SPEED, "window_max": chance.choice((2, 3))}
        plan = replace(plan, hyper_parameters=paced) if _goes(lambda: rules.make(plan.rule, **paced)) else plan
    plan = _with_what_is_rare(plan, chance, damage=damage)
    plan = replace(plan, tables=_may_have_tables(plan) and chance.random() < _TABLES)
    plan = replace(plan, neighbors=chance.choice((1, 2, 9)) if chance.random() < _NEIGHBORS else 0)
    return replace(plan, sets=chance.random() < _SETS)


def _with_what_is_rare(plan: Plan, chance: random.Random, *, damage: bool) -> Plan:
    """Draw faults for rare actions of the plan's rule: refusals, and buffers that are drained."""
    if len(plan.batches) == 1 or chance.random() >= _RARE:
        return plan
    if plan.rule == "ringmaster":  # These faults lose answers to a worker whose commits are refused.
        limits = {"threshold": 1, "patience": chance.choice((1, 2, None))}
        place = int(chance.random() * plan.workers)
        ats = [8 + int(30 * chance.random()) for _ in range(4)]
        faults = tuple(Fault("half cut", at, f"w{place}", 0.02 + chance.random(), place) for at in ats)
        return replace(plan, hyper_parameters=plan.hyper_parameters | limits, faults=faults)
    # The buffer holds as many movements as there are workers, and then the number of workers changes.
    if plan.rule in BUFFERED and plan.every and not damage:
        faults = (Fault("kill driver", 20 + int(80 * chance.random()), amount=chance.random()),)
        resized = plan.resized or _dealt(chance, plan.batches)
        rule = plan.hyper_parameters | {"buffer": None}
        return replace(plan, hyper_parameters=rule, resized=resized, bound=None, every=1, faults=faults)
    return plan


def _may_have_tables(plan: Plan) -> bool:
    rule = plan.make_rule()
    plain = plan.wire_format == FORMATS[0] and not (plan.overlap or plan.gap)
    return plain and rule.traits.rows and isinstance(rule.window, int)


def _in_cluster(plan: Plan, chance: random.Random) -> Plan:
    """Return ``plan`` with a server in the cluster, a second attempt of which may run next to the first one."""
    faults = list(plan.faults)
    for _ in range(chance.choice((0, 1, 1, 2))):
        faults.append(Fault("speculate", 1 + int(80 * chance.random())))
    return replace(plan, cluster=True, faults=tuple(faults))


def _goes(require: Callable[[], object]) -> bool:
    """Return whether ``require`` raises no `ConfigurationError`."""
    try:
        require()
    except ConfigurationError:
        return False
    return True


def _with_other_rule(plan: Plan, chance: random.Random) -> Plan:
    """Return ``plan`` with any other rule; even without a formula, what is restored must equal what was saved."""
    drawn = {rule for rule, *_ in _RULES}
    name = chance.choice([name for name in rules.center_rules() if name not in drawn] + 3 * list(_OFTEN))
    hyper_parameters: dict[str, Any] = {}
    family = rules.center_rules()[name].info.family
    if family in ("delta", "elastic"):
        hyper_parameters["window"] = chance.choice((1, 2, 3))
    if family == "elastic":
        hyper_parameters["rho"] = 0.1
    if name in BUFFERED:
        hyper_parameters["buffer"] = chance.choice((None, 2, 3))
    if name == "ringmaster":
        hyper_parameters |= {"threshold": chance.choice((1, 2, None)), "patience": chance.choice((0, 1, 2, None))}
    if name == "fedbuff":
        hyper_parameters["momentum"] = chance.choice((0.0, 0.5))
    if name == "fedopt":
        hyper_parameters["form"] = chance.choice(("adam", "yogi", "adagrad", "amsgrad"))
    if name == "adag":
        hyper_parameters |= {"form": chance.choice(("4.7", "4.1norm")), "algorithm": chance.choice((11, 12, 13))}
    traits = rules.make(name, **hyper_parameters).traits
    held_back = traits.synchronous or traits.fixed_workers
    return replace(
        plan,
        rule=name,
        hyper_parameters=hyper_parameters,
        learning_rate=0.5 if traits.gradient else None,
        overlap=traits.overlaps and chance.random() < 0.3,
        wire_format=FORMATS[0],
        long=0.0 if held_back else plan.long,
        bound=None if traits.synchronous or traits.pull_first else plan.bound,
    )


def _dealt(chance: random.Random, batches: tuple[int, ...]) -> tuple[int, ...]:
    """Distribute the same number of mini-batches over another number of partitions."""
    rows, workers = sum(batches), chance.choice([workers for workers in (1, 2, 3, 4) if workers != len(batches)])
    cuts = sorted(int(chance.random() * (rows + 1)) for _ in range(workers - 1))
    return tuple(end - start for start, end in zip([0, *cuts], [*cuts, rows], strict=True))


#: Faults that are harder in combination, on one partition and soon after each other.
_TOGETHER = (
    ("stop and rival",),
    ("stop and rival", "kill worker"),
    ("half cut", "rival"),
    ("rival", "half cut"),
    ("half cut", "half cut"),
    ("half cut", "half cut", "half cut"),
    ("half cut", "stop worker"),
    ("vanish", "rival"),
    ("stall", "rival", "cut"),
    ("rival", "rival"),
    ("rival", "kill server"),
    ("half cut", "kill server"),
    ("stop worker", "kill server", "rival"),
    ("power cut", "crash in disk"),
    ("kill driver", "crash in disk"),
    ("second driver", "kill server"),
    ("disk full", "kill server"),
    ("snapshot rot", "kill server"),
    ("log rot", "kill server"),
    ("log rot", "kill server twice"),
    ("store crawls", "kill server"),
    ("impostor", "kill worker"),
    ("nan", "kill server"),
    ("nan", "rival"),
    ("kill server twice", "half cut"),
    ("disk slow", "kill driver twice"),
    ("disk slow", "second driver", "kill driver"),
    ("stop at start", "rival"),
    ("kill next server", "kill driver"),
    ("kill next server", "kill server"),
)


def _combined_faults(chance: random.Random, kinds: tuple[str, ...], workers: int) -> list[Fault]:
    together, place = chance.choice(_TOGETHER), int(chance.random() * workers)
    at, faults = 3 + int(12 * chance.random()), []
    for kind in together:
        low, high = KINDS[kind]
        faults.append(Fault(kind, at, f"w{place}", low + (high - low) * chance.random() ** 2, place))
        at += 1 + int(4 * chance.random())
    return [fault for fault in faults if fault.kind in kinds]


def _survivable(faults: list[Fault], *, standstills: bool) -> tuple[Fault, ...]:
    """Return the ``faults`` that a job must survive; five deaths of a server in a row, or long suspensions, end it."""
    deaths, stopped, kept = 0, 0.0, list[Fault]()
    for fault in faults:
        # The server is then killed if there is a checkpoint; one at its start follows another one that was killed.
        still = fault.kind in ("stop server", "stop at start", "stop shard") and fault.amount > 15.0
        deaths += DEATHS.get(fault.kind, 0) + int(still) + int(fault.scope == SHARD and fault.kind in _OF_LINKS)
        stopped += fault.amount if fault.kind in _STOP_WORKERS else 0.0
        if fault.kind == "store crawls" and fault.kind in [other.kind for other in kept]:
            continue
        if still and (deaths > 3 or not standstills):
            continue
        if (fault.kind not in DEATHS or deaths <= 3) and (fault.kind not in _STOP_WORKERS or stopped <= 90.0):
            kept.append(fault)
    return tuple(kept)


#: The share of the jobs that train a stream, and of those that receive other rows again.
_STREAMS, _ALTERED = 1 / 12, 0.15
#: The share of the jobs whose windows follow the workers' speeds, if their rule allows it.
_BY_SPEED = 0.2
#: The share of the jobs with faults for rare actions of their rule.
_RARE = 0.4
#: The share of the jobs with a checkpoint whose server is in the cluster.
_CLUSTER = 0.1
#: The share of the jobs with tables, where they are allowed.
_TABLES = 0.5
#: The share of the jobs with shards, and no tables yet, that have tables, where they are allowed; and of those with
#: both that have rows which come and go.
_DIVIDED_TABLES, _VISITS = 0.8, 0.7
#: The share of the jobs with workers on the server's host.
_NEIGHBORS = 0.4
#: The share of the jobs whose drivers set numbers.
_SETS = 0.2
#: The share of the jobs with relays, where they are allowed.
_RELAYS = 0.4
#: The share of the jobs whose workers lend, where they are allowed to.
_LENDS = 0.5
#: The share of the jobs whose workers exchange with each other, and what those have in common with other jobs.
_MEMBERS = 1 / 12
_OF_MEMBERS = ("every", "keep", "latency", "capacity", "yielding", "disk", "statistics", "rounding", "lists")
#: The share of the jobs with a rule that is not listed below.
_OTHER_RULES = 0.3
#: Those rules whose center acts in a way that few others have, and the only rule of a family.
_OFTEN = ("averaging", "ringmaster", *BUFFERED)
#: Rules whose workers may be held back.
_PACED = ("downpour", "asgd", "dana_zero")
_RULES: tuple[tuple[str, dict[str, Any], float | None], ...] = (
    ("downpour", {"window": 1}, None),
    ("downpour", {"window": 2}, None),
    ("downpour", {"window": 3}, None),
    ("asgd", {}, 1.0),
    ("ssgd", {}, 12.0),
    ("aeasgd", {"window": 2, "rho": 0.25}, None),
    ("dana_zero", {}, 1.0),
    ("zealous_downpour", {"window": 3, "explore": True}, None),
)


#: Schedules of the server's learning rate; some runs have a constant rate instead.
_SCHEDULES: tuple[dict[str, Any], ...] = (
    {"schedule": "step", "boundaries": (3, 9), "factor": 0.5},
    {"schedule": "warm_up", "length": 6, "divisor": 4.0, "boundaries": (9,), "factor": 0.5},
    {"schedule": "cosine", "length": 20, "least": 0.01},
)


def _fault(chance: random.Random, kinds: tuple[str, ...], focus: str, workers: int) -> Fault:
    kind = chance.choice(kinds)
    low, high = KINDS[kind]
    place = int(chance.random() * workers)
    scope = focus if focus and chance.random() < 0.8 else chance.choice(("", "", "driver", f"w{place}"))
    if scope.startswith("w"):
        place = int(scope[1:])
    most = 20 if scope.startswith("w") else 60
    amount = low + (high - low) * chance.random() ** (1 if low <= 0 else 2)
    return Fault(kind, 1 + int(most * chance.random()), scope, amount, place)
