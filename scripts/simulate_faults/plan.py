"""What a run is: a job, and the faults that strike it, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from distkeras.ps.transport.deadlines import Deadlines

#: Kinds of faults, with the range of what they are drawn with: seconds, or a share of a write.
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
    "no memory": (1.0, 6.0),
    "clock jump": (-4000.0, 4000.0),
    "slow start": (1.0, 12.0),
    "kill driver": (0.0, 8.0),
    "second driver": (0.0, 8.0),
}
#: Kinds that end a server.
DEATHS = ("kill server", "kill sender", "power cut", "crash in disk", "kill driver")
#: Kinds that stop a worker.
_STOP_WORKERS = ("stop worker", "stop and rival")
#: Kinds that need a checkpoint for the job to go on.
NEED_CHECKPOINT = (*DEATHS, "second driver")


#: Short ones, but in the proportions that real ones have.
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
    """Something that happens at a send.

    Args:
        kind: one of `KINDS`.
        at: the number of the send, counted from 1 in its scope.
        scope: "" for any connection, "driver", or "w" and a partition's number.
        amount: seconds, or the share of the write that arrives.
        place: a partition, for kinds that strike one.
    """

    kind: str
    at: int
    scope: str = ""
    amount: float = 0.0
    place: int = 0

    def __str__(self) -> str:
        where = f" of {self.scope}" if self.scope else ""
        return f"at send {self.at}{where}: {self.kind} ({self.amount:.3g}, partition {self.place})"


@dataclass(frozen=True)
class Plan:
    """One run.

    Args:
        seed: of every choice while it runs.
        workers, epochs: of the job.
        batches: mini-batches an epoch of each partition.
        rule, hyper_parameters, learning_rate: what the job trains with.
        overlap, wire_format, tls: likewise.
        compute: seconds of a step; ``long`` of them take several leases.
        every, keep: of the checkpoint; ``every`` 0: there is none.
        latency, fragmenting, capacity, yielding, disk: of the surroundings.
        deadlines: of every wait.
        faults: in no order.
    """

    seed: int
    workers: int = 2
    epochs: int = 1
    batches: tuple[int, ...] = (4, 4)
    rule: str = "downpour"
    hyper_parameters: dict[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
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
    deadlines: Deadlines = field(default_factory=lambda: DEADLINES)
    faults: tuple[Fault, ...] = ()

    @property
    def sums(self) -> bool:
        """Whether the center counts how often each mini-batch was applied."""
        return self.rule in ("downpour", "asgd")

    @property
    def shows(self) -> bool:
        """Whether it shows which ones were, once their round is over."""
        return self.sums or self.rule == "ssgd"


def draw(seed: int, *, kinds: tuple[str, ...] = tuple(KINDS)) -> Plan:
    """The plan of ``seed``."""
    chance = random.Random(seed)
    workers = chance.choice((1, 2, 2, 3, 3))
    epochs = chance.choice((1, 1, 2))
    rule, hyper_parameters, rate = chance.choice(_RULES)
    batches = tuple(chance.choice((0, 1, 2, 3, 4, 5, 6)) for _ in range(workers))
    overlap = rule == "downpour" and chance.random() < 0.3
    formats = ("float32",) * 4 + (("bfloat16", "int8") if rule == "downpour" else ())
    every = 0 if chance.random() < 0.12 else chance.choice((1, 2, 3, 5, 100))
    long = chance.choice((0.0, 0.0, 0.0, 0.1, 0.3))
    possible = [kind for kind in kinds if every or kind not in NEED_CHECKPOINT]
    enabled = tuple(chance.sample(possible, min(len(possible), chance.choice((1, 2, 2, 3, 4, 8)))))
    focus = f"w{int(chance.random() * workers)}" if chance.random() < 0.5 else ""
    count = chance.choice((0, 1, 2, 3, 4, 6, 8)) if enabled else 0
    drawn = [_fault(chance, enabled, focus, workers) for _ in range(count)]
    if chance.random() < 0.4:
        drawn = _combined_faults(chance, kinds, workers) or drawn
    faults = _survivable(
        [fault for fault in drawn if every or fault.kind not in NEED_CHECKPOINT], standstills=every > 0
    )
    tls = chance.random() < 0.05  # its records' sizes are left to chance: nothing may depend on them
    return Plan(
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
        faults=faults,
    )


#: Faults that are worse together, on one partition and soon after each other.
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
    """As many of ``faults`` as a job must survive: five deaths of a server in a row end it, or long stops."""
    deaths, stopped, kept = 0, 0.0, []
    for fault in faults:
        still = fault.kind == "stop server" and fault.amount > 15.0  # it is killed then, if there is a checkpoint
        deaths += fault.kind in DEATHS or still
        stopped += fault.amount if fault.kind in _STOP_WORKERS else 0.0
        if still and (deaths > 3 or not standstills):
            continue
        if (fault.kind not in DEATHS or deaths <= 3) and (fault.kind not in _STOP_WORKERS or stopped <= 90.0):
            kept.append(fault)
    return tuple(kept)


_RULES: tuple[tuple[str, dict[str, Any], float | None], ...] = (
    ("downpour", {"window": 1}, None),
    ("downpour", {"window": 2}, None),
    ("downpour", {"window": 3}, None),
    ("asgd", {}, 1.0),
    ("ssgd", {}, 12.0),
    ("aeasgd", {"window": 2, "rho": 0.25}, None),
    ("dana_zero", {}, 1.0),
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
