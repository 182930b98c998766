"""Workers that lend: real clients, loops and helpers in threads, whose steps a test permits one by one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np

from distkeras.ps.protocol.loop import Loop
from distkeras.ps.protocol.messages import Welcome
from distkeras.ps.transport.row_links import RawBatch
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.helping import Helping, LoanTask, bounded
from distkeras.ps.worker.loop import run_worker, work
from support.patience import patience
from support.ps.running_server import Running
from support.ps.toy_model import ToyBatch, ToyReplica, batches

SIZE = 3


class Gone(Exception):
    """The worker ends as if it had been killed."""


class Rows:
    """The rows of a partition: a number for each mini-batch, in so many arrays."""

    def __init__(self, values: Sequence[float], epochs: int, checksum: int = 7, arrays: int = 1) -> None:
        self._values, self._epochs, self.checksum, self._arrays = values, epochs, checksum, arrays
        self.batches_per_epoch = len(values)

    def raw_batches(self, epoch: int, number: int) -> Iterator[RawBatch]:
        for batch in batches(self._values, epochs=self._epochs, start=(epoch, number)):
            yield RawBatch(
                batch.epoch, batch.index, batch.last, self.checksum, [np.array([batch.value])] * self._arrays
            )


class Lender(threading.Thread):
    """An attempt at a partition, which then helps; it takes a step when it is permitted to."""

    def __init__(
        self,
        running: Running,
        worker: int,
        values: Sequence[float],
        *,
        attempt: int = 0,
        epochs: int = 1,
        host: str = "127.0.0.1",
        **rows: Any,
    ) -> None:
        super().__init__(daemon=True)
        self._running, self._values, self._epochs, self._rows = running, values, epochs, rows
        self._attempt = attempt
        self._permits, self._gone = threading.Semaphore(0), False
        #: Steps that it has taken, and its error.
        self.steps = 0
        self.error: Exception | None = None
        self.client = self._client_for(worker)
        self.helping = Helping(
            running.address,
            running.deadlines,
            worker=worker,
            attempt=attempt,
            epochs=epochs,
            host=lambda: host,
            workers=2,
            task=LoanTask(self._client_for, self._begin_loan, lambda rows, lease: nullcontext(rows)),
        )
        self.start()

    def permit(self, steps: int = 1 << 20) -> None:
        """Permit so many further steps."""
        for _ in range(min(steps, 1 << 12)):
            self._permits.release()

    def die(self) -> None:
        """End the worker at its next step."""
        self._gone = True
        self._permits.release()

    def ended(self) -> Exception | None:
        """Wait for the worker's end; return its error."""
        self.join(patience(60))
        assert not self.is_alive()
        return self.error

    def run(self) -> None:
        try:
            welcome = self.client.join()
            if not welcome.finished:
                run_worker(self.client, welcome, self._begin)
            if welcome.owes or not welcome.finished:
                self._offer()
            self.helping.help(lambda: self.client.stopping)
        except Gone:
            pass
        except Exception as error:  # noqa: BLE001 - `ended` returns it
            self.error = error
        finally:
            self.helping.close()
            self.client.close()

    def _client_for(self, lease: int, connection: int = 0) -> WorkerClient:
        return self._running.client(lease, self._attempt, SIZE, connection=connection)

    def _begin(self, welcome: Welcome) -> Loop:
        own = batches(self._values, epochs=self._epochs, start=(welcome.epoch, welcome.batch))
        return self._loop(self.client, self._offering(own))

    def _begin_loan(self, stack: ExitStack, client: WorkerClient, partition: int, rows: Iterator[RawBatch]) -> Loop:
        own = (
            ToyBatch(raw.epoch, raw.number, raw.last, float(raw.arrays[0][0]), checksum=raw.checksum) for raw in rows
        )
        return self._loop(client, own)

    def _loop(self, client: WorkerClient, own: Iterator[ToyBatch]) -> Loop:
        replica, rule = ToyReplica(SIZE, -1.0, self._gradient, np.float32), self._running.rule
        return work(rule, replica, bounded(own, lambda: client.end), partial(client.payload, rule.traits.parts))

    def _gradient(self, theta: np.ndarray, value: float) -> np.ndarray:
        assert self._permits.acquire(timeout=patience(60))
        if self._gone:
            raise Gone
        self.steps += 1
        return np.full(SIZE, value)

    def _offering(self, own: Iterator[ToyBatch]) -> Iterator[ToyBatch]:
        for batch in own:
            self._offer()
            yield batch

    def _offer(self) -> None:
        self.helping.offer(lambda: Rows(self._values, self._epochs, **self._rows), self.client.incarnation)
