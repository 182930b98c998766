"""Pruning keeps the log files of the snapshots that it keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.ps.toy_model import ToyJob

from distkeras.ps.checkpoint.directory import LogFiles, SnapshotDirectory
from distkeras.ps.checkpoint.snapshot import capture
from distkeras.ps.rules import make


def test_a_snapshot_that_is_kept_keeps_the_log_files_that_became_others(tmp_path: Path) -> None:
    job = ToyJob(make("downpour", window=1), np.zeros(5), [np.ones((2, 5))], dtype=np.float32)
    directory = SnapshotDirectory(str(tmp_path), token="0000000a")
    directory.take_over()
    files = LogFiles()
    for replaced in (0, 1):
        job.commit(0)
        files = directory.save_log(job.center.log.read(), files, replaced=replaced)
        directory.save(capture(job.center), files)
    directory.prune(2, files, directory.require_owned())
    latest = max(tmp_path.glob("snapshot-*"))
    latest.write_bytes(latest.read_bytes()[:-1])
    saved = SnapshotDirectory(str(tmp_path)).latest()
    assert saved is not None
    assert (saved.state.header["clock"], len(saved.log), saved.log.missing) == (1, 1, 0)
