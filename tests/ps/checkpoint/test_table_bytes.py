"""The size of tables' rows in a checkpoint, with the file sizes of a real job."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ps.saved_tables import SavedTables


@pytest.mark.parametrize("width", [64, 1])
def test_a_hundredth_of_the_rows_takes_about_a_hundredth_of_the_bytes(tmp_path: Path, width: int) -> None:
    """The number of each row takes eight further bytes."""
    rows = 20_000
    saved = SavedTables(tmp_path, [(rows, width)])
    saved.snapshot()
    base = sum(path.stat().st_size for path in tmp_path.glob("table-*"))
    before = saved.table_files()
    saved.commit(range(50, rows, 100))
    expected = saved.snapshot()
    written = sum((tmp_path / f"{name}.dks").stat().st_size for name in saved.table_files() - before)
    assert base == pytest.approx(rows * 4 * width, abs=200)
    assert written == pytest.approx(rows // 100 * (4 * width + 8), abs=200)
    assert [rows.tobytes() for rows in saved.read()] == [rows.tobytes() for rows in expected]


def test_a_table_in_several_files_is_restored(tmp_path: Path) -> None:
    saved = SavedTables(tmp_path, [(300_000, 64)])
    saved.commit(range(0, 300_000, 7))
    saved.snapshot()
    saved.commit(range(150_000, 300_000, 3))
    expected = saved.snapshot()
    assert [(file.whole, file.size >> 20) for file in saved.files.files] == [(True, 64), (True, 9), (False, 12)]
    assert saved.read()[0].tobytes() == expected[0].tobytes()
