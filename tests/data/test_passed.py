"""The completed share of an epoch, while the number of rows is still unknown."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from distkeras.data.batches import DataSpec
from distkeras.data.columns import Column
from distkeras.data.ordering import ROW_HASH
from distkeras.data.source import BatchSource

ROWS, BATCH = 400, 4


def shares(hashes: np.ndarray | None, epochs: int = 1) -> list[float]:
    """Return the completed share that a source reports with each of its mini-batches."""
    columns = {"x": pa.array(np.arange(ROWS))} | ({} if hashes is None else {ROW_HASH: pa.array(hashes)})
    rows = pa.table(columns).to_batches(max_chunksize=100)
    spec = DataSpec((Column("x"),), batch_size=BATCH, epochs=epochs, shuffle=False)
    with BatchSource(iter(rows), spec, worker=0, depth=1) as source:
        return [source.passed(batch) for batch in source]


def random_hashes() -> np.ndarray:
    return np.random.default_rng(0).integers(-(2**63), 2**63 - 1, ROWS)


def test_sorted_hashes_give_the_share() -> None:
    found = shares(np.sort(random_hashes()))
    assert np.abs(np.array(found) - np.arange(1, 101) / 100).max() < 0.1
    assert found[-1] == 1.0


@pytest.mark.parametrize("hashes", [None, random_hashes()])
def test_the_share_of_the_first_epoch_is_unknown_without_sorted_hashes(hashes: np.ndarray | None) -> None:
    found = shares(hashes, epochs=2)
    assert found[0] == 0.0
    assert found[99] == 1.0
    assert found[100:] == [pytest.approx(number / 100) for number in range(1, 101)]
