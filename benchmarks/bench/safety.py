"""The cost of safety: real training steps with a server with snapshots, checks and tags of frames, and without.

Two processes train M with one thread each and exchange every ten steps, as the tasks of a Spark job do.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np

from bench.measure import Case, Factory
from bench.processes import Fleet
from bench.workload import INPUTS, WORKERS, build
from distkeras.data.batches import Batch
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.protocol.framing import KEY_BYTES, Nonces
from distkeras.ps.protocol.loop import KeepRequest, PullRequest
from distkeras.ps.protocol.messages import CommitRecord
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import work
from distkeras.ps.worker.optimizer_keeper import OptimizerKeeper, SaveInterval

if TYPE_CHECKING:
    import keras

SECTION = "safety"
RULE = make("agn", window=10)
ROWS = 128
TARGET = 0.97
#: The sides that train with Adam, without and with sending its state.
ADAM = ("adam", "keeping")
#: The side whose frames have no tags.
UNTAGGED = "untagged"
_SIZE = 784 * 1000 + 1000 + 1000 * 2000 + 2000 + 2000 * 1000 + 1000 + 1000 * 10 + 10
_KEY = bytes(KEY_BYTES)
_PATIENCE = 60.0


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    return [partial(_safety, 3.0, 10) if quick else partial(_safety, 15.0, 100)]


@contextmanager
def _safety(seconds: float, every: int) -> Iterator[list[Case]]:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="distkeras-bench-"))
        plain = stack.enter_context(ServerProcess(ServerSettings(RULE, workers=WORKERS)))
        saving = stack.enter_context(
            ServerProcess(ServerSettings(RULE, workers=WORKERS, checkpoint=Checkpoint(directory, every)))
        )
        addresses = {"plain": plain.address, "saving": saving.address}
        addresses |= {"careful": stack.enter_context(_served(True)), "careless": stack.enter_context(_served(False))}
        for side in ADAM:
            addresses[side] = stack.enter_context(ServerProcess(ServerSettings(RULE, workers=WORKERS))).address
        addresses[UNTAGGED] = stack.enter_context(_served(True, tags=False))
        for side, address in addresses.items():
            with _tags(side != UNTAGGED):
                driver = DriverClient(address)
                driver.publish(np.zeros(_SIZE, np.float32))
                driver.close()
        connect = {side: partial(Trainee, address=address, side=side) for side, address in addresses.items()}
        fleet = stack.enter_context(Fleet(WORKERS, connect))
        for side in connect:
            fleet.run(side, 1.0)

        def rate(side: str) -> float:
            return fleet.run(side, seconds).rate

        yield _cases(rate, every)


def _cases(rate: Callable[[str], float], every: int) -> list[Case]:
    """Return the cases, given a function that measures the rate of a side by name."""
    job = f"M, {WORKERS} workers, AGN, window {RULE.window}, batches of {ROWS}"
    return [
        Case(
            SECTION,
            f"snapshots every {every} commits, {job}",
            "commits/s",
            partial(rate, "saving"),
            partial(rate, "plain"),
            target_limit=TARGET,
            note="limit: no snapshots",
        ),
        Case(
            SECTION,
            f"ledger, history and finite check, {job}",
            "commits/s",
            partial(rate, "careful"),
            partial(rate, "careless"),
            target_limit=TARGET,
            note="limit: the same server without them",
        ),
        Case(
            SECTION,
            f"tags of frames, {job}",
            "commits/s",
            partial(rate, "careful"),
            partial(rate, UNTAGGED),
            target_limit=TARGET,
            note="limit: the same server and workers without them",
        ),
        Case(
            SECTION,
            f"Adam's state kept for a successor (`keep_optimizer`), {job}",
            "commits/s",
            partial(rate, "keeping"),
            partial(rate, "adam"),
            target_limit=TARGET,
            note=f"limit: Adam without that; a state has {8 * _SIZE / 1e6:.1f} MB",
        ),
    ]


@contextmanager
def _tags(there: bool) -> Iterator[None]:
    """Return a context in which new connections have tags, or none at both ends."""
    with patch.object(Nonces, "seal", Nonces.seal if there else lambda *_: None):
        yield


class Trainee:
    """A worker that trains on the same rows repeatedly.

    Args:
        number: number of the worker.
        address: address of its server.
        side: name of the server's side.
    """

    def __init__(self, number: int, address: Address, side: str) -> None:
        for variable in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
            os.environ[variable] = "1"
        replica = KerasReplica(_model(adam=side in ADAM))
        rng = np.random.default_rng(number)
        x, y = rng.random((ROWS, INPUTS), np.float32), rng.integers(0, 10, ROWS).astype(np.int32)
        batches = (Batch(0, index, False, (x,), (y,), None) for index in count())
        metrics = ("loss", "accuracy")
        self._client = WorkerClient(address, worker=number, attempt=0, size=replica.size, metrics=metrics)
        with _tags(side != UNTAGGED):
            welcome = self._client.join()
        keeper = OptimizerKeeper(RULE, replica, SaveInterval(), welcome) if side == "keeping" else None
        self._loop = work(RULE, replica, batches, lambda: self._client.payload(1), keeper=keeper)
        self._request = next(self._loop)

    def exchange(self) -> None:
        """Train one window, and commit it."""
        while True:
            request = self._request
            if isinstance(request, CommitRecord):
                self._request = self._loop.send(self._client.commit(request))
                return
            if isinstance(request, KeepRequest):
                self._client.keep_optimizer(request.state)
            self._request = self._loop.send(self._client.pull() if isinstance(request, PullRequest) else None)


def _model(*, adam: bool) -> keras.Model:
    """Return model M, compiled with SGD, or with ``adam``, with Adam."""
    model = build("M")
    if adam:
        import keras

        # The rate is as small as SGD's, so that random labels do not matter.
        model.compile(keras.optimizers.Adam(1e-6), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@contextmanager
def _served(careful: bool, tags: bool = True) -> Iterator[Address]:
    """Yield the address of a server process; unless ``careful``, it checks nothing and writes no snapshot."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, careful, tags), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_PATIENCE):
            raise TimeoutError(f"a server must come up within {_PATIENCE:g} s")
        host, port = ours.recv()
        yield Address(host, port, _KEY)
    finally:
        ours.close()
        process.join(_PATIENCE)


def _serve(pipe: Connection, careful: bool, tags: bool) -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    from distkeras.ps.center.commit_log import CommitLog
    from distkeras.ps.server import dispatcher

    if not careful:
        for holder, name in ((dispatcher, "check_shapes"), (dispatcher, "not_finite"), (CommitLog, "add")):
            patch.object(holder, name, lambda *_, **facts: None).start()
    with _tags(tags), ParameterServer(ServerSettings(RULE, workers=WORKERS), _KEY) as server:
        pipe.send(server.address)
        pipe.poll(None)  # The call returns when the other end closes.
