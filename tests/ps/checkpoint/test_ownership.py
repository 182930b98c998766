"""Ownership of a checkpoint's directory while another server claims it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ps.toy_model import ToyJob

from distkeras.ps.checkpoint.ownership import Claim, Name, Ownership, parsed
from distkeras.ps.checkpoint.snapshots import LogFiles, SnapshotDirectory
from distkeras.ps.checkpoint.state import capture
from distkeras.ps.checkpoint.store import Store
from distkeras.ps.errors import OwnershipLostError
from distkeras.ps.rules import make
from distkeras.ps.world.files import Files, LocalFiles
from distkeras.ps.world.world import World


class InterruptedClaim(World):
    """The real world, but ``happens`` is called just before a claim is written."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self.happens = happens

    def files(self, uri: str, *, create: bool = True) -> Files:
        world = self

        class Claimed(LocalFiles):
            def write(self, name: str, pieces: Iterable[Any]) -> None:
                if name.startswith("owner-"):
                    world.happens()
                super().write(name, pieces)

        return Claimed(Path(uri))


def test_the_new_owner_continues_from_the_latest_owned_snapshot(tmp_path: Path) -> None:
    job = ToyJob(make("downpour", window=1), np.zeros(5), [np.ones((2, 5))], dtype=np.float32)
    older = SnapshotDirectory(str(tmp_path), token="0000000a")
    older.take_over()

    def save() -> None:
        log_files = older.save_log(job.center.log.read(), LogFiles()) if job.center.clock else LogFiles()
        older.save(capture(job.center), log_files)
        older.require_owned()  # the snapshot is valid: workers may rely on it

    save()

    def commit_and_save() -> None:
        job.commit(0)
        save()

    saved = SnapshotDirectory(str(tmp_path), token="0000000b", world=InterruptedClaim(commit_and_save)).take_over()
    assert saved is not None
    assert saved.state.header["clock"] == len(saved.log) == 1


@pytest.mark.parametrize("epoch", [0, 1])
def test_simultaneous_attempts_have_different_claims(tmp_path: Path, epoch: int) -> None:
    """Each attempt lists the files before the others write their claims."""
    store = Store(str(tmp_path))
    before = [Name("owner", Claim(1, "0000000a"))] if epoch else []
    attempts = [Ownership(store, "0000000a") for _ in range(3)]
    for number, attempt in enumerate(attempts, 5):
        attempt.write(before, epoch, epoch, number)
    claims = [attempt.claim for attempt in attempts]
    assert len({claim.incarnation for claim in claims}) == 3
    names = [name for name in map(parsed, store.names()) if name is not None]
    for attempt in attempts[:-1]:
        with pytest.raises(OwnershipLostError):
            attempt.require(names)
        assert attempt.lost_to_own_job
    attempts[-1].require(names)


def test_a_restarted_server_does_not_take_the_directory_from_a_newer_job(tmp_path: Path) -> None:
    """The restarted server lists the files before the newer job claims, and writes its own claim after that."""
    newer = SnapshotDirectory(str(tmp_path), token="0000000b")
    SnapshotDirectory(str(tmp_path), token="ffffffff").take_over()
    restarted = SnapshotDirectory(str(tmp_path), token="ffffffff", world=InterruptedClaim(newer.take_over))
    with pytest.raises(OwnershipLostError, match="claim 000002-0000000b of process"):
        restarted.take_over(epoch=1, after=1)
    newer.require_owned()
    assert not list(tmp_path.glob("owner-000001-ffffffff.1*"))  # the claim that was lost is removed


def test_only_drafts_of_earlier_owners_are_removed(tmp_path: Path) -> None:
    """The draft of a newer owner is about to become its snapshot."""
    older, newer = (SnapshotDirectory(str(tmp_path), token=token) for token in ("0000000a", "0000000b"))
    drafts = []
    for directory in (older, newer):
        directory.take_over()
        drafts.append(tmp_path / f"snapshot-{directory.claim}-000001-000000000007.dks.part")
        drafts[-1].write_bytes(b"half")
    older.sweep()
    assert [draft.exists() for draft in drafts] == [True, True]
    newer.sweep()
    assert [draft.exists() for draft in drafts] == [False, True]
