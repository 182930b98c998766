"""States of optimizers in a checkpoint: each is written once, and a damaged one affects no other."""

from __future__ import annotations

import logging
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.logs import texts
from support.patience import patience, until
from support.present import present
from support.ps.clocks import HandWorld
from support.ps.toy_model import ToyJob

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import KeptState
from distkeras.ps.checkpoint import checkpointer
from distkeras.ps.checkpoint.checkpointer import Checkpoint, Checkpointer, OptimizerFiles
from distkeras.ps.checkpoint.snapshots import LogFiles, SnapshotDirectory
from distkeras.ps.checkpoint.state import capture
from distkeras.ps.errors import SnapshotError
from distkeras.ps.protocol.loop import OptimizerState
from distkeras.ps.rules import make


def toy_center(workers: int = 2) -> Center:
    center = ToyJob(make("downpour"), np.zeros(5), [np.ones((2, 5))] * workers, dtype=np.float32).center
    for lease in center.leases.values():
        lease.sequence = 7
    return center


def kept(*numbers: int, sequence: int = 7) -> KeptState:
    content = np.array(numbers, np.uint8)
    return KeptState(OptimizerState("Adam", content, zlib.crc32(content.data)), 3, sequence, 1.7e9)


class Saved:
    """A directory with the snapshots of a center that keeps optimizer states."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.center, self.clock = folder, toy_center(), HandWorld()
        self.directory = SnapshotDirectory(str(folder), token="0000000a")
        self.directory.take_over()
        self.files = OptimizerFiles(self.directory, self.center, {}, self.clock)

    def save(self, *, now: bool = False) -> None:
        self.center.clock += 1
        state = capture(self.center)
        self.directory.save(state, LogFiles(), self.files.save(state.optimizers, now=now))
        state.drop()

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("optimizer-*.dks"))

    def restored(self, workers: int = 2) -> dict[int, Any]:
        """Return the states of a restored center, by partition: content and sequence number of the commit before."""
        center = toy_center(workers)
        center.leases.clear()
        directory = SnapshotDirectory(str(self.folder), token="0000000b")
        directory.restore(center, present(directory.latest()), same_attempts=False)
        states = {worker: lease.optimizer for worker, lease in center.leases.items()}
        return {worker: state and (state.state.content.tolist(), state.sequence) for worker, state in states.items()}


def test_a_kept_state_is_restored(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    saved.center.leases[1].optimizer = kept(1, 2, 3, sequence=5)
    saved.save()
    assert saved.restored() == {0: None, 1: ([1, 2, 3], 5)}


def test_no_state_is_restored_for_other_partitions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    saved = Saved(tmp_path)
    saved.center.leases[1].optimizer = kept(1)
    saved.save()
    assert saved.restored(3) == {0: None, 1: None, 2: None}
    assert texts(caplog, "distkeras.ps.checkpoint") == [
        "all optimizers begin with a new state, because the saved states belong to other partitions"
    ]


def test_each_state_is_written_once(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    saved.center.leases[0].optimizer = kept(1)
    for _ in range(3):
        saved.save()
    saved.center.leases[1].optimizer = kept(2)
    saved.save()
    assert [name.split("-")[-1] for name in saved.names()] == ["000000000000", "000000000001"]
    assert saved.restored() == {0: ([1], 7), 1: ([2], 7)}


def test_a_restored_state_is_not_written_again(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    saved.center.leases[0].optimizer = kept(1)
    saved.save()
    latest = present(saved.directory.latest())
    center = toy_center()
    center.leases.clear()
    saved.directory.restore(center, latest, same_attempts=False)
    files = OptimizerFiles(saved.directory, center, latest.optimizer_files, saved.clock)
    assert files.save({0: present(center.leases[0].optimizer)}, now=True) == {0: saved.names()[0]}
    assert len(saved.names()) == 1


@pytest.mark.parametrize("damage", ["torn", "gone", "changed"])
def test_a_damaged_state_is_reported_and_the_others_are_restored(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved = Saved(tmp_path)
    for worker, lease in saved.center.leases.items():
        lease.optimizer = kept(worker)
    saved.save()
    path = tmp_path / f"{saved.names()[0]}.dks"
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        content[-20] ^= 1
        path.write_bytes(content if damage == "changed" else content[:-5])
    assert saved.restored() == {0: None, 1: ([1], 7)}
    (record,) = [record for record in caplog.records if getattr(record, "event", None) == "optimizer"]
    assert record.worker == 0  # type: ignore[attr-defined]  # an event has a worker
    assert record.getMessage().startswith("the state of an optimizer cannot be read, and is lost: ")


def test_states_that_no_snapshot_names_are_removed(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    for number in range(4):
        saved.center.leases[0].optimizer = kept(number)
        saved.save()
        saved.directory.prune(2, LogFiles(), saved.directory.require_owned())
    assert len(saved.names()) == 2
    assert saved.restored() == {0: ([3], 7), 1: None}


def test_a_dropped_state_is_not_restored(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    saved.center.leases[0].optimizer = kept(1)
    saved.save()
    saved.center.leases[0].optimizer = None
    saved.save()
    assert saved.restored() == {0: None, 1: None}


def test_snapshots_name_older_states_if_writing_states_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing takes ten seconds, and the share is a tenth: the next states are written after 100 s, or at the end."""
    saved = Saved(tmp_path)
    save = SnapshotDirectory.save_optimizer

    def save_slowly(self: SnapshotDirectory, worker: int, state: KeptState) -> str:
        saved.clock.now += 10.0
        return save(self, worker, state)

    monkeypatch.setattr(SnapshotDirectory, "save_optimizer", save_slowly)
    written = []
    for number, now in enumerate((False, False, False, True)):
        saved.center.leases[0].optimizer = kept(number)
        saved.save(now=now)
        written.append(saved.restored()[0][0])
        saved.clock.now += 99.0 if number == 1 else 1.0
    assert written == [[0], [0], [2], [3]]
    assert checkpointer.SHARE == 0.1


def test_a_state_that_cannot_be_written_does_not_delay_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved = Saved(tmp_path)

    def fail(*arguments: Any) -> str:
        raise SnapshotError("no room")

    monkeypatch.setattr(SnapshotDirectory, "save_optimizer", fail)
    saved.center.leases[0].optimizer = kept(1)
    saved.save()
    assert saved.restored() == {0: None, 1: None}
    assert texts(caplog, "distkeras.ps.checkpoint") == [
        "the optimizer's state of a partition could not be saved: no room"
    ]


@pytest.mark.parametrize("failures", [0, 1])
def test_the_last_snapshot_names_the_last_states_even_if_writing_them_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """A snapshot covers the last commit and names an older state; the one at the end names the last state."""
    saved = Saved(tmp_path)
    save = SnapshotDirectory.save_optimizer
    left = [failures]

    def save_slowly(self: SnapshotDirectory, worker: int, state: KeptState) -> str:
        saved.clock.now += 10.0
        if closing and left[0]:
            left[0] -= 1
            raise SnapshotError("no room for a moment")
        return save(self, worker, state)

    monkeypatch.setattr(SnapshotDirectory, "save_optimizer", save_slowly)
    closing, changed = False, threading.Condition()
    running = Checkpointer(
        Checkpoint(str(tmp_path), every=1), saved.directory, saved.center, changed, None, saved.clock
    )
    running.start()
    for number in range(3):
        with changed:
            saved.center.leases[0].optimizer = kept(number)
            saved.center.clock += 1
            mark = running.mark()
        until(lambda mark=mark: running.covers(mark))  # type: ignore[misc]  # the value of this turn
    assert saved.restored()[0] == ([0], 7)
    closing = True
    running.close(patience(10))
    assert saved.restored()[0] == ([2], 7)
    assert left == [0]
