"""Mini-batches on their way from the task that has read their rows to one that trains them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from distkeras.data.batches import Batch, DataSpec, as_weight, flat_weight
from distkeras.data.source import BatchSource, Prefetcher
from distkeras.ps.transport.row_links import AHEAD, RawBatch

#: Seconds for the thread that fetches mini-batches to end.
_CLOSE_SECONDS = 60.0


class OfferedRows:
    """The rows of a partition, all of which ``source`` has read, as `worker.helping.RowSource` asks for them."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self.batches_per_epoch, self.checksum = source.batches_per_epoch, source.checksum

    def raw_batches(self, epoch: int, number: int) -> Iterator[RawBatch]:
        """Yield the mini-batches from a position on."""
        for batch in self._source.from_position(epoch, number):
            arrays = [*batch.x, *batch.y, *flat_weight(batch.weight)]
            yield RawBatch(batch.epoch, batch.index, batch.last, batch.checksum, arrays)


def as_batch(raw: RawBatch, spec: DataSpec) -> Batch:
    """Return a mini-batch that another worker has sent."""
    x, y, arrays = len(spec.features), len(spec.labels), tuple(raw.arrays)
    sides = arrays[:x], arrays[x : x + y], as_weight(arrays[x + y :])
    return Batch(raw.epoch, raw.number, raw.last, *sides, raw.checksum, spec.is_open)


@contextmanager
def fetched_ahead(rows: Iterator[RawBatch], lease: int) -> Iterator[Iterator[RawBatch]]:
    """Yield an iterator over ``rows`` that a thread fetches ahead."""
    fetched = Prefetcher(rows, 2 * AHEAD, name=f"distkeras-loan-{lease}", what="rows of another worker", worker=lease)
    fetched.start()
    try:
        yield fetched
    finally:
        fetched.close(_CLOSE_SECONDS)
