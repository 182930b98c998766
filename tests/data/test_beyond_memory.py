"""Partitions of ten times the memory that a worker may use: in every epoch, the rest is read from files."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.patience import patience

#: Its argument is the memory of the spool in bytes; the kernel allows the process 40 MiB more than at its start.
PROGRAM = """
import resource, sys, zlib
import numpy as np
import pyarrow as pa
from distkeras.data.columns import Column
from distkeras.data.source import BatchSource
from distkeras.data.batches import DataSpec

WIDTH, RECORD, ALLOWED, TIMES = 1024, 256, 40 << 20, 10
SPEC = DataSpec((Column("x", (WIDTH,)),), (Column("y", (), "int64"),), batch_size=64, epochs=2,
                spool_bytes=int(sys.argv[1]))


def records(rows):
    offsets = pa.array(np.arange(RECORD + 1, dtype=np.int32) * WIDTH)
    for first in range(0, rows, RECORD):
        x = np.repeat(np.arange(first, first + RECORD, dtype=np.float32), WIDTH)
        y = pa.array(np.arange(first, first + RECORD))
        yield pa.RecordBatch.from_arrays([pa.ListArray.from_arrays(offsets, pa.array(x)), y], names=["x", "y"])


def drain(rows):
    seen = np.zeros((2, rows), np.int8)
    with BatchSource(records(rows), SPEC, worker=0, directory=sys.argv[2]) as source:
        for batch in source:
            seen[batch.epoch, batch.y[0]] += 1
            assert (batch.x[0] == batch.y[0][:, None]).all()
    assert (seen == 1).all()


drain(4 * RECORD)  # libraries load parts of themselves when they are first used
with open("/proc/self/status") as status:
    now = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (now + ALLOWED, now + ALLOWED))
drain(TIMES * ALLOWED // (4 * WIDTH))
"""

#: The memory of a freed array returns to the system; otherwise the heap's size depends on the order of the arrays.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def drained(spool_bytes: int, folder: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(spool_bytes), str(folder)],
        env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1", **RETURNED},
        capture_output=True,
        text=True,
        timeout=patience(120),
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce the limit")
def test_ten_times_the_memory_is_read_from_files(tmp_path: object) -> None:
    done = drained(1 << 20, tmp_path)
    assert done.returncode == 0, done.stderr
    # The limit is enforced: without files, the memory does not suffice.
    assert "MemoryError" in drained(1 << 40, tmp_path).stderr
