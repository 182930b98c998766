"""The part of the rows' checksum that does not depend on their distribution over partitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from distkeras.data.ordering import ROW_HASH, RowChecksum
from distkeras.ps.checkpoint.state import State, sum_of, sum_of_rows

HASHES = np.random.default_rng(3).integers(-(2**63), 2**63, 1000)


def checksum(hashes: np.ndarray) -> int:
    accumulated = RowChecksum(block_rows=7)
    for piece in np.array_split(hashes, 3):
        accumulated.update(pa.RecordBatch.from_pydict({ROW_HASH: piece}))
    return accumulated.before(len(hashes))


@pytest.mark.parametrize("partitions", [1, 2, 5])
def test_the_sum_does_not_depend_on_partitions_and_order(partitions: int) -> None:
    shuffled = np.random.default_rng(4).permutation(HASHES)
    assert sum_of(map(checksum, np.array_split(shuffled, partitions))) == sum_of([checksum(HASHES)])
    assert 0 <= checksum(HASHES) < 2**63


def test_a_changed_missing_or_repeated_row_changes_the_sum() -> None:
    other = HASHES.copy()
    other[500] ^= 1 << 40
    data = (HASHES, other, HASHES[1:], np.append(HASHES, HASHES[0]))
    assert len({sum_of([checksum(hashes)]) for hashes in data}) == len(data)


def test_another_order_changes_the_checksum() -> None:
    assert checksum(HASHES[::-1]) != checksum(HASHES)


def lease(epoch: int, checksum: int = 5 << 32, *, sequence: int = 3, finished: bool = False) -> dict[str, Any]:
    return {"epoch": epoch, "checksum": checksum, "sequence": sequence, "finished": finished}


EMPTY = lease(0, -1, sequence=0, finished=True)


@pytest.mark.parametrize(
    ("leases", "known"),
    [
        ([lease(1), lease(2)], 10),
        ([lease(1), lease(0)], None),
        ([lease(1), lease(1, -1)], None),
        ([lease(1)], None),
        ([lease(1), EMPTY], 5),
    ],
    ids=["all read", "one in its first epoch", "one read by another job", "one that has not joined", "one empty"],
)
def test_the_sum_is_known_when_every_partition_was_read_to_its_end(leases: list[Any], known: int | None) -> None:
    header = {"workers": 2, "leases": dict(enumerate(leases)), "ends_early": False}
    assert sum_of_rows(State(header, {})) == known


def test_a_partition_that_left_a_job_that_ended_early_may_have_rows() -> None:
    header = {"workers": 2, "leases": {0: lease(1), 1: EMPTY}, "ends_early": True}
    assert sum_of_rows(State(header, {})) is None
