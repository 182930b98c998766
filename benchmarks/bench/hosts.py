"""Two hosts of two workers each, whose only link is a shaped `cable`: DASO, synchronous SGD and DOWNPOUR in turns.

The first host is here, with the server of each side; the second one is behind the cable. Workers of one host reach each
other, and those of the first one their server, without the cable. All take real training steps, on the same cores. One
host of two workers, and these two hosts, also compare shared memory with connections between DASO's workers of a host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.cable import BURST, QUEUE, Link, NoLinkError, shaped
from bench.link import ROWS, PacedTrainee, serving_center
from bench.measure import Case, Factory
from bench.processes import ExchangeClient, Fleet
from bench.ps import MEDIUM, SMALL
from bench.rig import elements
from distkeras.data.batches import Batch
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps.protocol.loop import Loop
from distkeras.ps.rules import Rule, make
from distkeras.ps.rules.base import Vector
from distkeras.ps.rules.daso import Daso
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.members import MemberLinks, Membership
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.daso import MemberReplica
from distkeras.ps.worker.loop import work

if TYPE_CHECKING:
    import keras

SECTION = "hosts"
_HOSTS, _DEVICES, _GBPS = 2, 2, 1
#: The link of a single host, in place of the cable.
_LOOPBACK = Link("lo", "127.0.0.1", "", "")
_SIZES = {"M": elements(MEDIUM), "S": elements(SMALL)}
#: Mini-batches of a run, by the model.
_BATCHES = {"M": 24, "S": 200}
#: The epochs, and mini-batches of an epoch: no epoch of a run ends.
_EPOCHS, _ENDLESS = 1, 1 << 40
_CYCLING = Daso(nodes=_HOSTS, warm_up=0, cool_down=0)
#: The rule of each side. DASO that blocks at every mini-batch, without a cast, is synchronous SGD.
_RULES: dict[str, Rule] = {
    "DASO": _CYCLING,
    "synchronous SGD": Daso(nodes=_HOSTS, warm_up=_EPOCHS, cool_down=0, cast=False),
    "DOWNPOUR at every batch": make("downpour", window=1),
    f"DOWNPOUR at every {_CYCLING.interval} batches": make("downpour", window=_CYCLING.interval),
}
#: The rule of workers that exchange nothing.
_ALONE = make("downpour", window=_CYCLING.interval)
#: Targets of DASO's rate over each side: the paper's conclusion is 34 % less time than with blocking exchanges.
_TARGETS = {"synchronous SGD": 1 / (1 - 0.34)}


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    counts = {model: _CYCLING.interval if quick else count for model, count in _BATCHES.items()}
    return [
        *(partial(_compared, model, batches) for model, batches in counts.items()),
        *(partial(_sharing, hosts, counts["M"]) for hosts in (_HOSTS, 1)),
    ]


def _never() -> float:
    raise AssertionError("without a link there is nothing to run")


@contextmanager
def _compared(model: str, batches: int) -> Iterator[list[Case]]:
    """Yield cases that compare DASO's steps with those of each other side, and with steps that exchange nothing."""
    found = {
        side: Case(
            SECTION,
            f"{4e-6 * _SIZES[model]:.3g} MB, {_HOSTS} hosts of {_DEVICES} workers, {_GBPS} Gbps, DASO and {side}",
            "steps/s",
            _never,
            None,
            target_naive=_TARGETS.get(side) if model == "M" else None,
        )
        for side in _RULES
        if side != "DASO"
    }
    with ExitStack() as stack:
        try:
            link = stack.enter_context(shaped(_GBPS))
        except NoLinkError as error:
            yield [replace(case, missing=str(error)) for case in found.values()]
            return
        rate = _rates(stack, link, _HOSTS, model, batches, {side: {"rule": rule} for side, rule in _RULES.items()})
        yield [
            replace(
                case,
                ours=partial(rate, "DASO"),
                limit=partial(rate, "alone"),
                naive=partial(rate, side),
                note=f"batches of {ROWS}; DASO with its defaults, while cycling; limit: no exchange; naive: {side}; "
                f"the server is on the first host (burst {BURST[_GBPS]}, queue {QUEUE})",
            )
            for side, case in found.items()
        ]


@contextmanager
def _sharing(hosts: int, batches: int) -> Iterator[Case]:
    """Yield the case of DASO's steps with shared memory on a host, compared with connections."""
    where = "1 host" if hosts == 1 else f"{hosts} hosts"
    between = "" if hosts == 1 else f", {_GBPS} Gbps"
    case = Case(
        SECTION,
        f"{4e-6 * _SIZES['M']:.3g} MB, {where} of {_DEVICES} workers{between}, DASO, shared memory",
        "steps/s",
        _never,
        None,
        note=f"batches of {ROWS}, while cycling; limit: no exchange; naive: the workers of a host use connections",
    )
    with ExitStack() as stack:
        try:
            link = _LOOPBACK if hosts == 1 else stack.enter_context(shaped(_GBPS))
        except NoLinkError as error:
            yield replace(case, missing=str(error))
            return
        rule = replace(_CYCLING, nodes=hosts)
        sides = {name: {"rule": rule, "shared": name == "shared"} for name in ("shared", "connection")}
        rate = _rates(stack, link, hosts, "M", batches, sides)
        yield replace(
            case, ours=partial(rate, "shared"), limit=partial(rate, "alone"), naive=partial(rate, "connection")
        )


def _rates(
    stack: ExitStack, link: Link, hosts: int, model: str, batches: int, sides: Mapping[str, dict[str, Any]]
) -> Callable[[str], float]:
    """Return a function that measures a side: the mean steps a second of one worker.

    Args:
        stack: owner of the processes.
        link: link between the hosts, if there are two.
        hosts: number of hosts.
        model: a key of `_SIZES`.
        batches: number of mini-batches of a run.
        sides: the arguments of `_trainee`, by side. The additional side "alone" exchanges nothing.
    """
    workers = hosts * _DEVICES
    connect: dict[str, Callable[[int], ExchangeClient]] = {"alone": partial(_trainee, link=link, model=model)}
    for side, options in sides.items():
        address = stack.enter_context(serving_center(link, options["rule"], workers, _SIZES[model]))
        connect[side] = partial(_trainee, link=link, model=model, address=address, **options)
    fleet = stack.enter_context(Fleet(workers, connect))

    def rate(side: str) -> float:
        fleet.run(side, 0.0, count=1)  # An exchange is in progress at the start and at the end of the timed run.
        cycles = batches // _CYCLING.interval
        return fleet.run(side, 0.0, count=cycles).rate * _CYCLING.interval / workers

    return rate


def _trainee(
    number: int, *, link: Link, model: str, rule: Rule = _ALONE, address: Address | None = None, shared: bool = True
) -> PacedTrainee:
    """Return the worker with this number; the first workers are on the first host."""
    far = number >= _DEVICES
    member = partial(PacedMember, host=link.far if far else link.host, shared=shared)
    kind = member if isinstance(rule, Daso) else PacedTrainee
    namespace = link.namespace if far else None
    return kind(number, namespace=namespace, address=address, rule=rule, model=model, pace=_CYCLING.interval)


class PacedMember(PacedTrainee):
    """A worker that exchanges with others.

    Args:
        number: number of the worker.
        host: address of the worker for other workers.
        shared: whether it shares memory with the workers of its host.
        options: see `PacedTrainee`.
    """

    def __init__(self, number: int, *, host: str, shared: bool, **options: object) -> None:
        self._host, self._shared = host, shared
        super().__init__(number, **options)  # type: ignore[arg-type]  # the options of the base class

    def _loop(self, client: WorkerClient, replica: KerasReplica, overlap: bool) -> Loop:
        assert isinstance(self._rule, Daso)
        links = MemberLinks(
            self._host,
            client.address.key,
            worker=client.worker,
            attempt=client.attempt,
            size=replica.size,
            shared=self._shared,
            deadlines=Deadlines(),
        )
        members = client.announce(*links.address, self._host, _ENDLESS)
        links.connect(Membership.of(members, client.worker))
        member = MemberReplica(self._rule, _PacedReplica(replica.model, self._wait_at), links, _EPOCHS)
        return work(self._rule, member, self._batches(), lambda: client.payload(1))


class _PacedReplica(KerasReplica):
    """A replica whose gradients wait for requests: a member's loop reads mini-batches ahead.

    Args:
        model: the built and compiled model.
        wait_at: called with the number of each mini-batch before its gradient.
    """

    def __init__(self, model: keras.Model, wait_at: Callable[[int], None]) -> None:
        super().__init__(model)
        self._wait_at = wait_at

    def gradient(self, batch: Batch, out: Vector) -> np.ndarray:
        """See `KerasReplica`."""
        self._wait_at(batch.index)
        return super().gradient(batch, out)
