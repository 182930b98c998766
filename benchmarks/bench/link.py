"""Exchanges over a network instead of loopback: the server is here, its clients are behind a shaped `cable`."""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np

from bench import echo
from bench.cable import BURST, QUEUE, Link, NoLinkError, enter, shaped
from bench.measure import Case, Factory
from bench.processes import ExchangeClient, Fleet, Where, serving
from bench.ps import MEDIUM
from bench.rig import WorkerExchange, elements
from bench.workload import CLASSES, INPUTS, PATIENCE, WORKERS, build
from distkeras.data.batches import Batch
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps.protocol.compression import FORMATS, codec_of
from distkeras.ps.protocol.loop import Loop, PullRequest, Reply
from distkeras.ps.protocol.messages import CommitRecord
from distkeras.ps.rules import Rule, make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import run_worker, work

SECTION = "link"
WINDOW = 10
RULE = make("agn", window=WINDOW)
ROWS = 128
METRICS = ("loss", "accuracy")
_SIZE = elements(MEDIUM)
#: Shorter than any exchange: a fleet that runs for this time does exactly one.
_ONCE = 1e-9


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    seconds = 0.4 if quick else 2.5
    return [partial(_overlap, 2.0 if quick else 15.0), *(partial(_formats, gbps, seconds) for gbps in BURST)]


def _never() -> float:
    raise AssertionError("without a link there is nothing to run")


@contextmanager
def _overlap(seconds: float) -> Iterator[Case]:
    """Yield cases of real training steps: with overlapped exchanges, with sequential ones, and without any."""
    case = Case(
        SECTION,
        f"M, {WORKERS} workers, window {WINDOW}, exchange overlapped with compute, 1 Gbps",
        "windows/s",
        _never,
        None,
        target_naive=1.5,
        note=f"AGN, batches of {ROWS}, one thread a worker; limit: no exchange; naive: no overlap",
    )
    with ExitStack() as stack:
        try:
            link = stack.enter_context(shaped(1))
        except NoLinkError as error:
            yield replace(case, missing=str(error))
            return
        overlapping, waiting = (stack.enter_context(serving_center(link, RULE, WORKERS)) for _ in range(2))
        trainee = partial(PacedTrainee, namespace=link.namespace)
        connect = {
            "overlapping": partial(trainee, address=overlapping, overlap=True),
            "waiting": partial(trainee, address=waiting),
            "alone": trainee,
        }
        fleet = stack.enter_context(Fleet(WORKERS, connect))

        def rate(side: str) -> float:
            fleet.run(side, _ONCE)  # An exchange is in progress at the start and at the end of the timed run.
            return fleet.run(side, seconds).rate

        for side in connect:
            fleet.run(side, 1.0)
        yield replace(
            case, ours=partial(rate, "overlapping"), limit=partial(rate, "alone"), naive=partial(rate, "waiting")
        )


@contextmanager
def serving_center(link: Link, rule: Rule, workers: int, size: int = _SIZE) -> Iterator[Address]:
    """Yield the address of a server at the near end of ``link``, with a center of zeros."""
    with ServerProcess(ServerSettings(rule, workers=workers, host=link.host)) as server:
        driver = DriverClient(server.address)
        driver.publish(np.zeros(size, np.float32))
        driver.close()
        yield server.address


class PacedTrainee:
    """A worker that trains on the same rows repeatedly, ``pace`` mini-batches for each request.

    Args:
        number: number of the worker.
        namespace: network namespace of its end of the link; None for that of this process.
        address: address of its server; None if it exchanges nothing.
        overlap: whether training continues while an exchange is in progress.
        rule: name of its update rule.
        model: its model, a key of `workload.HIDDEN`.
        pace: a multiple of the rule's window.
    """

    def __init__(
        self,
        number: int,
        *,
        namespace: str | None,
        address: Address | None = None,
        overlap: bool = False,
        rule: Rule = RULE,
        model: str = "M",
        pace: int = WINDOW,
    ) -> None:
        if namespace is not None:
            enter(namespace)
        for variable in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
            os.environ[variable] = "1"
        self._number, self._rule, self._model, self._pace = number, rule, model, pace
        self._told, self._ready = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._train, args=(address, overlap), daemon=True)
        self._thread.start()
        self._await()

    def exchange(self) -> None:
        """Train one window, after the previous one's reply; without overlap, also wait for this one's reply."""
        self._told.release()
        self._await()

    def _await(self) -> None:
        if not self._ready.acquire(timeout=PATIENCE):
            raise TimeoutError(f"a worker must train a window within {PATIENCE:g} s")

    def _wait_at(self, index: int) -> None:
        """Wait for the next request before its first mini-batch."""
        if index % self._pace == 0:
            self._ready.release()
            self._told.acquire()

    def _train(self, address: Address | None, overlap: bool) -> None:
        replica = KerasReplica(build(self._model))
        if address is None:
            own = (np.empty(replica.size, np.float32),)
            _answer_at_once(work(self._rule, replica, self._paced(), lambda: own), replica.size)
            return
        client = WorkerClient(address, worker=self._number, attempt=0, size=replica.size, metrics=METRICS)
        run_worker(client, client.join(), lambda _: self._loop(client, replica, overlap))

    def _loop(self, client: WorkerClient, replica: KerasReplica, overlap: bool) -> Loop:
        return work(self._rule, replica, self._paced(), lambda: client.payload(1), overlap=overlap)

    def _paced(self) -> Iterator[Batch]:
        for batch in self._batches():
            self._wait_at(batch.index)
            yield batch

    def _batches(self) -> Iterator[Batch]:
        rng = np.random.default_rng(self._number)
        x, y = rng.random((ROWS, INPUTS), np.float32), rng.integers(0, CLASSES, ROWS, np.int32)
        for index in count():
            yield Batch(0, index, False, (x,), (y,), None)


def _answer_at_once(loop: Loop, size: int) -> None:
    center = np.zeros(size, np.float32)
    request = next(loop)
    while True:
        request = loop.send(Reply(center=center) if isinstance(request, PullRequest | CommitRecord) else None)


@contextmanager
def _formats(gbps: int, seconds: float) -> Iterator[list[Case]]:
    """Yield cases of shorter wire formats and float32 over the same link, with a client that computes nothing."""
    found = {
        name: Case(
            SECTION,
            f"{4 * _SIZE / 1e6:.3g} MB exchange, {name}, {gbps} Gbps",
            "exchanges/s",
            _never,
            None,
            note=f"limit: raw echo of as many bytes; naive: {FORMATS[0]}",
        )
        for name in FORMATS[1:]
    }
    with ExitStack() as stack:
        try:
            link = stack.enter_context(shaped(gbps))
        except NoLinkError as error:
            yield [replace(case, missing=str(error)) for case in found.values()]
            return
        address = stack.enter_context(serving_center(link, make("downpour"), len(FORMATS)))
        connect: dict[str, Callable[[int], ExchangeClient]] = {
            name: partial(_exchange, namespace=link.namespace, worker=worker, address=address, wire_format=name)
            for worker, name in enumerate(FORMATS)
        }
        # In float32 elements, which the echo sends: the vector may be longer by up to three bytes.
        sizes = {name: -(-codec.nbytes // 4) for name in found if (codec := codec_of(name, _SIZE))}
        for name, size in sizes.items():
            service = stack.enter_context(serving(partial(echo.server, 4 * size), link.host))
            connect[f"echo of {name}"] = partial(
                echo_client, namespace=link.namespace, address=service.address, size=size
            )
        fleet = stack.enter_context(Fleet(1, connect))
        for side in connect:
            fleet.run(side, seconds / 4)
        reached: dict[str, list[float]] = {name: [] for name in found}

        def rate(side: str) -> float:
            return fleet.run(side, seconds).rate

        def bare(name: str) -> float:
            echoes = rate(f"echo of {name}")
            reached[name].append(echoes * 8 * 2 * 4 * sizes[name] / (gbps * 1e9))
            return echoes

        def note(name: str) -> str:
            share = f"the echo moves {statistics.median(reached[name]):.0%} of the nominal rate"
            return f"{found[name].note}; {share} (burst {BURST[gbps]}, queue {QUEUE})"

        yield [
            replace(
                case,
                ours=partial(rate, name),
                limit=partial(bare, name),
                naive=partial(rate, FORMATS[0]),
                note=partial(note, name),
            )
            for name, case in found.items()
        ]


def _exchange(number: int, *, namespace: str, worker: int, address: Address, wire_format: str) -> WorkerExchange:
    enter(namespace)
    return WorkerExchange(worker, address, _SIZE, wire_format)


def echo_client(number: int, *, namespace: str, address: Where, size: int) -> echo.EchoClient:
    """Return a client of `echo.server` at the far end of the link."""
    enter(namespace)
    return echo.EchoClient(number, address, size)
