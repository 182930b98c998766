from __future__ import annotations

import numpy as np

from distkeras.data.batches import in_blocks
from distkeras.data.columns import Column
from distkeras.data.spool import Spool

COLUMNS = (Column("x", (2, 3)), Column("y", (), "int64"))


def rows(first: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.arange(first, first + n)
    return np.repeat(numbers, 6).reshape(n, 2, 3).astype("float32"), numbers


def test_rows_of_the_spool_become_blocks_without_a_copy() -> None:
    spool = Spool(COLUMNS, 1 << 20, "/nowhere")
    pieces = [spool.append(rows(first, 7)) for first in range(0, 42, 7)]
    blocks = list(in_blocks(pieces, 10))
    assert [len(block[0]) for block in blocks] == [10, 10, 10, 10, 2]
    for block, first in zip(blocks, range(0, 42, 10), strict=True):
        for got, kept, expected in zip(block, spool.arrays(), rows(first, len(block[0])), strict=True):
            np.testing.assert_array_equal(got, expected)
            assert np.shares_memory(got, kept)


def test_rows_that_are_not_adjacent_are_joined_by_a_copy() -> None:
    numbers = np.arange(24.0).reshape(12, 2).copy()  # the array owns its memory
    for parts in ([numbers[:3], numbers[4:6]], [numbers[3:5], numbers[:3]], [numbers[:2], numbers[2:4].copy()]):
        (block,) = in_blocks([(part,) for part in parts], 10)
        np.testing.assert_array_equal(block[0], np.concatenate(parts))
    flat = np.arange(24.0)  # views whose shape differs from that of their base
    (block,) = in_blocks([(flat[:4].reshape(2, 2),), (flat[4:8].reshape(2, 2),)], 10)
    np.testing.assert_array_equal(block[0], flat[:8].reshape(4, 2))
