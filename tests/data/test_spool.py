from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.present import present

from distkeras.data.columns import Column
from distkeras.data.spool import Spool, local_directory

COLUMNS = (Column("x", (2, 3)), Column("y", (), "int64"))
ROW_BYTES = 2 * 3 * 4 + 8


def rows(first: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.arange(first, first + n)
    return np.repeat(numbers, 6).reshape(n, 2, 3).astype("float32"), numbers


@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=6),
    budget=st.integers(0, 8000 * ROW_BYTES),
    read_between=st.booleans(),
)
def test_memory_and_files_contain_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], budget: int, read_between: bool
) -> None:
    directory = tmp_path_factory.mktemp("spool")
    spool = Spool(COLUMNS, budget, str(directory))
    for first, n in zip(np.cumsum([0, *sizes]), sizes, strict=False):
        kept = spool.append(rows(first, n))
        np.testing.assert_array_equal(kept[1], rows(first, n)[1])
        if read_between:
            assert len(spool.arrays()[0]) == first + n
    assert spool.rows == sum(sizes)
    assert spool.on_disk == (sum(sizes) > budget // ROW_BYTES)
    assert list(directory.iterdir()) == []  # the files have no names, so a killed process leaves none behind
    held = spool.arrays()
    spool.close()
    for got, expected in zip(held, rows(0, sum(sizes)), strict=True):  # returned arrays outlive the spool
        np.testing.assert_array_equal(got, expected)
        assert got.dtype == expected.dtype


@pytest.mark.parametrize("at_first", [0, 1 << 20])
def test_memory_stays_within_the_budget(monkeypatch: pytest.MonkeyPatch, at_first: int) -> None:
    monkeypatch.setattr("distkeras.data.spool._FIRST_BYTES", at_first)
    spool = Spool(COLUMNS, 5000 * ROW_BYTES, "/nowhere")
    for first in range(0, 5000, 500):
        spool.append(rows(first, 500))
        assert sum(present(array.base).nbytes for array in spool.arrays()) <= 5000 * ROW_BYTES
    with pytest.raises(FileNotFoundError):
        spool.append(rows(5000, 1))


def test_files_are_distributed_over_sparks_local_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path}/a,{tmp_path}/gone,{tmp_path}/b")
    assert [local_directory(worker)[-1] for worker in range(3)] == ["a", "b", "a"]
    monkeypatch.delenv("SPARK_LOCAL_DIRS")
    assert Path(local_directory(0)).is_dir()
