"""The directory of a job's snapshots.

The commit log only grows, so a snapshot has only its totals, and the log is saved in separate files, each with the
commits between two snapshots. A snapshot names the earlier log files, but can be restored without them: weights, clock
and leases are in the snapshot. The rows of tables are in separate files as well (`table_files` writes those that have
changed), and the snapshots that name them cannot be restored without them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.center.commit_log import COMMIT, CommitLog, LogRows
from distkeras.ps.center.leases import KeptState
from distkeras.ps.center.tables import Rows
from distkeras.ps.checkpoint.ownership import Claim, Name, Ownership, parsed
from distkeras.ps.checkpoint.parts import PartFile, SavedSlice, Share, joined_parts, part_of, vectors_of, with_vectors
from distkeras.ps.checkpoint.row_files import RowFile, RowFiles, chosen_rows, joined_living
from distkeras.ps.checkpoint.state import State, restore
from distkeras.ps.checkpoint.store import (
    FIRST,
    LONGEST,
    PATIENCE,
    PATIENCE_TO_BEGIN,
    DamagedError,
    Store,
    require_same_job,
    retried,
)
from distkeras.ps.errors import ConfigurationError, DistkerasError, OwnershipLostError, SnapshotError
from distkeras.ps.events import report
from distkeras.ps.protocol.loop import OptimizerState
from distkeras.ps.protocol.tables import Ids
from distkeras.ps.transport.deadlines import Backoff
from distkeras.ps.world.world import REAL, World

#: The kinds of files that snapshots name, and that are removed with the last snapshot that names them.
_NEEDED = ("log", "optimizer", "table", "part")


def saved_job(uri: str) -> dict[str, Any] | None:
    """Return the description of the job in the latest snapshot of a directory; None if no snapshot can be read."""
    store = Store(uri, create=False)
    names = [name for name in map(parsed, retried(store.names)) if name is not None]
    for name in reversed(_snapshots(names)):
        try:
            job: dict[str, Any] = retried(partial(store.header, str(name)))["job"]
        except (DamagedError, LookupError):
            continue
        return job
    return None


#: How many log files are merged into one, and bytes of the largest merged file.
_MERGED, _LARGEST = 8, 64 << 20


@dataclass(frozen=True)
class LogFile:
    """One file of the log: its name, number of commits, bytes, and number of merges that led to it (``level``)."""

    name: str
    commits: int
    size: int
    level: int = 0


@dataclass(frozen=True)
class LogFiles:
    """The files of a log, in order; their levels never increase."""

    files: tuple[LogFile, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(file.name for file in self.files)

    @property
    def commits(self) -> int:
        return sum(file.commits for file in self.files)

    def due(self) -> int:
        """Return how many of the last files must be merged into one; 0: none."""
        taken = size = 0
        while taken < len(self.files):
            files = self.files[: len(self.files) - taken]
            level = files[-1].level
            run = next((count for count, file in enumerate(reversed(files)) if file.level != level), len(files))
            size += sum(file.size for file in files[-run:])
            # The merged file of the levels below has this level, if it is the next higher one.
            merged = 1 if taken and level == self.files[-taken].level + 1 else 0
            if run + merged < _MERGED or size > _LARGEST:
                break
            taken += run
        return taken

    def replace_last(self, file: LogFile, replaced: int = 0) -> LogFiles:
        """Return these files, with the last ``replaced`` ones replaced by ``file``."""
        return LogFiles((*self.files[: len(self.files) - replaced], file))


log = logging.getLogger(__name__)

#: Seconds for which a claim is retried: for a driver that may resume a job, and for a server that is restarted.
_PATIENCE_TO_RESUME, _PATIENCE_WITHIN_JOB = 60.0, 600.0
#: Attributes of a `KeptState` that are saved in addition to the state.
_KEPT_OF_STATE = ("attempt", "sequence", "kept_at")
#: The token of a process that only reads.
_NO_TOKEN = "0" * 8
_T = TypeVar("_T")


@dataclass(frozen=True)
class Saved:
    """The latest snapshot that could be read, with those files of its log that could be read."""

    name: str
    state: State
    log: CommitLog
    log_files: LogFiles
    #: By partition, the file with the optimizer's state.
    optimizer_files: Mapping[int, str] = field(default_factory=dict)
    #: The files with the rows of the tables, in the order in which they are read.
    row_files: tuple[RowFile, ...] = ()
    #: The files with the elements of a center that was divided among shards, in their order; none: it was not divided.
    parts: tuple[PartFile, ...] = ()


class _Newest(NamedTuple):
    """A snapshot that was read, without its log."""

    name: Name
    header: dict[str, Any]
    arrays: dict[str, np.ndarray]
    row_files: tuple[RowFile, ...]
    tables: tuple[Rows, ...]
    parts: tuple[PartFile, ...]


class SnapshotDirectory:
    """The snapshots of one job.

    Args:
        uri: a directory, or a URI that Arrow's filesystems open; made if it is not there.
        job: JSON-ready values that a job which resumes must share.
        token: of the job, 8 hexadecimal digits.
        record_activity: called after each list and each piece that was read to restore, and between retries.
        whole: read the rows, and the vectors of a center that was divided, too; else these files are only checked, one
            by one.
    """

    def __init__(
        self,
        uri: str,
        job: Mapping[str, Any] | None = None,
        token: str = _NO_TOKEN,
        world: World = REAL,
        record_activity: Callable[[], object] = lambda: None,
        *,
        whole: bool = True,
    ) -> None:
        self._job = dict(job or {})
        self._whole = whole
        self._world, self._record_activity = world, record_activity
        self._store = Store(uri, world, record_activity)
        self._ownership = Ownership(self._store, token, world)
        self._serial, self._step = 0, 1
        self._strays: set[str] = set()
        #: The other files that each snapshot needs, for the snapshots that were read or written.
        self._needs: dict[Name, frozenset[str]] = {}

    def latest(self) -> Saved | None:
        """Return the latest snapshot that is not damaged; None if there are no snapshots."""

        def listed() -> list[Name]:
            return _snapshots(self._listed())

        return self._with_log(self._newest(listed(), listed))

    def take_over(
        self,
        *,
        fresh: bool = False,
        epoch: int = 0,
        after: int = 0,
        attempt: int | None = None,
        place: Mapping[str, Any] | None = None,
    ) -> Saved | None:
        """Claim the directory, and return the latest snapshot in it, as `latest` does.

        Args:
            fresh: the job began without a snapshot. Without an ``epoch``, there must be no snapshots; else those of
                other jobs are ignored.
            epoch, after, attempt, place: see `Ownership.write`.
        """
        patience = _PATIENCE_WITHIN_JOB if epoch else PATIENCE_TO_BEGIN if fresh else _PATIENCE_TO_RESUME
        names = self._listed(patience)
        if attempt is not None and not epoch:
            self._require_first(names)
        snapshots = self._eligible(names, fresh, epoch)

        def listed() -> list[Name]:
            return self._eligible(self._listed(patience), fresh, epoch)

        if epoch:
            self._ownership.require_own(names, epoch)
            if not names:
                report(
                    log,
                    "snapshot",
                    "the checkpoint %r has no files any more: the job begins again from its start",
                    self._store.uri,
                )
        # The snapshot is read before the claim: if that fails, the present owner keeps the directory.
        newest = self._newest(snapshots, listed)
        self._retry_unreachable(lambda: self._ownership.write(names, epoch, after, attempt, place), patience)
        try:
            names = self._retry_unreachable(self.require_owned, patience)
            self._record_activity()
            eligible = self._eligible(names, fresh, epoch)
        except DistkerasError:
            self._ownership.withdraw()  # the unused claim must not block another server
            raise
        if eligible != snapshots:
            newest = self._newest(eligible, listed)
        return self._with_log(newest)

    def own(self, saved: Saved) -> bool:
        """Return whether ``saved`` was taken in this job, not in the job that it resumes."""
        return self._ownership.is_own(_name_of(saved.name))

    @property
    def claim(self) -> Claim:
        return self._ownership.claim

    @property
    def lost_to_own_job(self) -> bool:
        """Return whether the directory was lost to another server of the same job."""
        return self._ownership.lost_to_own_job

    def own_epoch(self) -> int:
        """Return the epoch of this job's claims; 0: none is left."""
        return self._ownership.own_epoch(self._listed())

    def is_superseded(self) -> bool:
        """Return whether another job's claim states that it has taken the directory from this job."""
        return self._ownership.is_superseded(self._listed())

    def adopt(self, claim: str, shard: int, shards: int) -> None:
        """Write, as one of ``shards`` shards, under the ``claim`` of their sequencer.

        No file of two shards has the same name; those of the sequencer are of other kinds.
        """
        self._ownership.adopt(claim)
        self._serial, self._step = shard, shards

    def announce(self, place: Mapping[str, Any]) -> None:
        """Write the address of this server, JSON-ready; `ownership.find` reads it."""
        store = Store(self._store.uri, self._world)  # `self._store` belongs to the checkpointer's thread
        self._retry_unreachable(lambda: store.save(str(Name("server", self._ownership.claim)), place, {}))

    def restore(self, center: Center, saved: Saved, *, same_attempts: bool, epochs: int | None = None) -> bool:
        """Restore ``saved`` into a new ``center``: see `state.restore`."""
        exact = restore(center, saved.state, same_attempts=same_attempts, epochs=epochs)
        center.log, center.metrics = saved.log, saved.state.metrics
        if exact:
            for worker, name in saved.optimizer_files.items():
                center.leases[worker].optimizer = self._load_optimizer(worker, name)
        elif saved.optimizer_files:
            log.info("all optimizers begin with a new state, because the saved states belong to other partitions")
        return exact

    def save_optimizer(self, worker: int, kept: KeptState) -> str:
        """Write a worker's optimizer state; return the file's name for a snapshot, or raise SnapshotError."""
        name, state = self._name("optimizer", worker), kept.state
        header = {name: getattr(kept, name) for name in _KEPT_OF_STATE}
        header |= {"layout": state.layout, "checksum": state.checksum}
        self._store.save(name, header, {"content": state.content})
        return name

    def _load_optimizer(self, worker: int, name: str) -> KeptState | None:
        try:
            header, arrays = self._read(name)
        except DamagedError as error:
            report(log, "optimizer", "the state of an optimizer cannot be read, and is lost: %s", error, worker=worker)
            return None
        state = OptimizerState(header["layout"], arrays["content"], header["checksum"])
        return KeptState(state, **{name: header[name] for name in _KEPT_OF_STATE})

    def save_rows(
        self, table: int, start: int, rows: np.ndarray, ids: Ids | None = None, *, of: Ids | None = None
    ) -> RowFile:
        """Write rows of a table, ``(count, width)``, to a file, for a snapshot to name.

        Args:
            ids: the row numbers, unique, in any order; None: all rows from ``start`` on.
            of: for a `PartialTable`, in which ``start`` and ``ids`` are places: the row numbers in the whole table.
        """
        name, arrays = self._name("table", table), {"rows": rows}
        stop = start + len(rows)
        if ids is not None:
            arrays["ids"], stop = ids, int(ids.max()) + 1
        if of is not None:
            arrays["of"] = of
        self._store.save(name, {}, arrays)
        return RowFile(name, table, start, stop, ids is None, sum(array.nbytes for array in arrays.values()))

    def save_part(self, shard: int, state: State, shapes: Sequence[Sequence[int]], files: Sequence[RowFile]) -> str:
        """Write the vectors of a shard's ``state``, and what its row ``files`` contain; return the file's name."""
        name, living = self._name("part", shard), state.header.get("living", ())
        header = {"tables": shapes, "living": living, "row_files": [asdict(file) for file in files]}
        self._store.save(name, header, vectors_of(state))
        return name

    def load_rows(self, file: RowFile) -> Rows:
        """Return the row numbers and rows of a partial file; raise a DamagedError if it is damaged or missing."""
        _, arrays = self._read(file.name)
        return arrays["ids"], arrays["rows"]

    def _load_tables(self, several: Sequence[RowFiles], *, joined: bool) -> tuple[Rows, ...]:
        """Return the tables of one server, or the rows of all shards ``joined``; or only check the files."""
        if not self._whole:
            for saved in several:
                for file in saved.files:
                    self._read(file.name)
            return ()
        if not joined:
            return several[0].tables(self._arrays)
        return chosen_rows(several, self._arrays, lambda ids: np.ones(len(ids), np.bool_))

    def _row_files(
        self, header: Mapping[str, Any], parts: Sequence[PartFile], read: Callable[[str], Mapping[str, Any]]
    ) -> list[RowFiles]:
        """Return what the server, or each shard, of a snapshot has saved of its tables; ``read`` returns a header."""
        if not parts:
            return [RowFiles.of(header["state"], header.get("row_files", ()))]
        return [RowFiles.of(own, own.get("row_files", ())) for own in (read(part.name) for part in parts)]

    def _require_first(self, names: list[Name]) -> None:
        """Raise an OwnershipLostError if another attempt of this job has claimed the directory."""
        # A second attempt must claim within the epoch of the first one. With a new epoch, it would take the directory
        # from a later job that has claimed it in between, and would treat the first one's snapshots as another job's.
        epoch = self._ownership.own_epoch(names)
        if epoch:
            raise OwnershipLostError(
                f"another attempt at this job's server has claimed {self._store.uri!r} with epoch {epoch}, after this "
                "attempt had found no claim there"
            )

    def _eligible(self, names: list[Name], fresh: bool, epoch: int) -> list[Name]:
        """Return the snapshots that a server may restore, oldest first: see `take_over`."""
        snapshots = _snapshots(names)
        if not fresh:
            return snapshots
        if epoch:  # the server of an older job may have written a snapshot meanwhile
            return [name for name in snapshots if self._ownership.is_own(name)]
        if snapshots:
            self._ownership.require_not_superseded(names)
            raise ConfigurationError(
                "`checkpoint` must be an empty directory, or `resume` must be true to continue the job in it. "
                f"Received: {self._store.uri!r} with {snapshots[-1]}"
            )
        return []

    def _newest(self, snapshots: list[Name], listed: Callable[[], list[Name]]) -> _Newest | None:
        """Return the newest of ``snapshots`` that can be read; None if there are none.

        The owner deletes old ones while it takes new ones: if none can be read, the directory is ``listed`` again.
        """
        backoff = Backoff(first=FIRST, longest=LONGEST, timeout=PATIENCE, world=self._world)
        while True:
            try:
                return self._newest_of(snapshots)
            except SnapshotError:
                before, snapshots = snapshots, listed()
                if snapshots == before or not backoff.pause():
                    raise

    def _newest_of(self, snapshots: list[Name]) -> _Newest | None:
        damage: DamagedError | None = None
        for name in reversed(snapshots):
            try:
                header, arrays = self._read(str(name))
                require_same_job(self._job, header["job"], self._store.uri)
                parts = tuple(part_of(values) for values in header.get("parts", ()))
                several = self._row_files(header, parts, lambda name: self._read(name)[0])
                if parts and self._whole:
                    arrays |= joined_parts(parts, lambda part: self._arrays(part.name))
                    header["state"] |= {"living": joined_living(several)}
                tables = self._load_tables(several, joined=bool(parts))
                return _Newest(name, header, arrays, () if parts else several[0].files, tables, parts)
            except DamagedError as error:
                report(log, "snapshot", "a damaged snapshot is skipped: %s", error)
                damage = error
        if damage is not None:
            raise SnapshotError(
                f"none of {len(snapshots)} snapshots can be read; the latest: {damage.message}. "
                "Train again in an empty directory"
            ) from damage
        return None

    def slice_of(self, name: str, share: Share) -> SavedSlice:
        """Return the ``share`` of a shard in snapshot ``name``."""
        header, arrays = self._read(name)
        parts = [part_of(values) for values in header.get("parts", ())]
        size = max(part.stop for part in parts) if parts else arrays["center"].size
        stretch, several = share.cut(size), self._row_files(header, parts, self._header)
        if parts:
            arrays |= joined_parts(parts, lambda part: self._arrays(part.name), stretch)
        else:
            arrays = dict(with_vectors(State({}, arrays), lambda vector: vector[stretch]).arrays)
        if len(parts) == share.shards:
            own = several[share.shard]
            tables, files, living = own.tables(self._arrays), own.files, own.living
        else:
            tables, files = chosen_rows(several, self._arrays, share.owns), ()
            living = joined_living(several, counted=share.shard == 0)
        return SavedSlice(State(header["state"] | {"living": living}, arrays, tables=tables), size, files)

    def _with_log(self, newest: _Newest | None) -> Saved | None:
        if newest is None:
            return None
        name, header, arrays, row_files, tables, parts = newest
        commit_log, files = CommitLog(), LogFiles()
        for file in (LogFile(**values) for values in header["log_files"]):
            try:
                log_header, rows = self._read(file.name)
                _require_columns(file.name, log_header)
            except DamagedError as error:
                text = "the records of %d commits are lost, and missing in history, commits and ledger: %s"
                report(log, "records", text, file.commits, error)
                continue
            commit_log.extend(LogRows(rows["commits"].view(COMMIT), rows["lengths"], rows["history"]))
            files = files.replace_last(file)
        state = State(header["state"], arrays, header["metrics"], header["log_totals"], tables=tables)
        commit_log.restore_totals(state.log_totals)
        optimizers = {int(worker): file for worker, file in header.get("optimizer_files", {}).items()}
        self._needs[name] = _names_needed(files, optimizers, row_files, parts)
        return Saved(str(name), state, commit_log, files, optimizers, row_files, parts)

    def _read(self, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return self._retry_unreachable(lambda: self._store.load(name))

    def _header(self, name: str) -> dict[str, Any]:
        """Return the header of a file whose checksum the sequencer has verified."""
        return self._retry_unreachable(lambda: self._store.header(name))

    def _arrays(self, name: str) -> dict[str, np.ndarray]:
        return self._read(name)[1]

    def _retry_unreachable(self, call: Callable[[], _T], patience: float = PATIENCE) -> _T:
        return retried(call, patience, world=self._world, record_activity=self._record_activity)

    def _listed(self, patience: float = PATIENCE) -> list[Name]:
        """Return all files there, for a server that has not begun to save."""
        names = self._retry_unreachable(self._names, patience)
        self._record_activity()
        return names

    def save_log(self, rows: LogRows, files: LogFiles, *, replaced: int = 0) -> LogFiles:
        """Write commits to a file that replaces the last ``replaced`` ones; they count once a snapshot names it."""
        if not len(rows.commits):
            return files
        before = LogFiles(files.files[: len(files.files) - replaced]).commits
        level = 1 + files.files[-replaced].level if replaced else 0
        arrays = {"commits": rows.commits.view(np.uint8), "lengths": rows.lengths, "history": rows.history}
        name = self._name("log", before)
        self._store.save(name, {"columns": COMMIT.names}, arrays)
        size = sum(array.nbytes for array in arrays.values())
        return files.replace_last(LogFile(name, len(rows.commits), size, level), replaced)

    def save(
        self,
        state: State,
        files: LogFiles,
        optimizer_files: Mapping[int, str] = MappingProxyType({}),
        row_files: Sequence[RowFile] = (),
        parts: Sequence[PartFile] = (),
    ) -> None:
        """Write a snapshot that needs these files; it is valid once `require_kept` has succeeded."""
        header = {
            "state": state.header,
            "job": self._job,
            "metrics": state.metrics,
            "log_files": [asdict(file) for file in files.files],
            "optimizer_files": {str(worker): file for worker, file in optimizer_files.items()},
            "log_totals": state.log_totals,
        }
        if row_files:
            header["row_files"] = [asdict(file) for file in row_files]
        if parts:
            header["parts"] = [asdict(part) for part in parts]
        name = self._name("snapshot", state.header["clock"])
        self._store.save(name, header, state.arrays)
        self._needs[_name_of(name)] = _names_needed(files, optimizer_files, row_files, parts)

    def require_owned(self) -> list[Name]:
        """Return all files of the directory, if this server still owns it, so that its writes are valid."""
        names = self._names()
        self._ownership.require(names)
        return names

    def require_kept(self) -> list[Name]:
        """As `require_owned`, for a server that serves; a SnapshotError says that it must be tried again."""
        names = self._names()
        self._ownership.require_kept(names)
        return names

    def sweep(self) -> None:
        """Remove the incomplete files of earlier servers."""
        drafts = ((draft, parsed(draft)) for draft in self._store.drafts())
        self._store.delete_drafts(draft for draft, name in drafts if name and name.claim < self._ownership.claim)

    def prune(self, keep: int, files: LogFiles, names: list[Name]) -> None:
        """Remove all but the latest ``keep`` snapshots, the files that none of these needs, and earlier claims."""
        own = [name for name in names if name.claim <= self._ownership.claim]
        snapshots = _snapshots(own)
        kept, doomed = snapshots[-keep:], snapshots[:-keep]
        doomed += [name for name in own if name.kind in ("owner", "server") and name.claim < self._ownership.claim]
        self._needs = {name: needed for name, needed in self._needs.items() if name in kept}
        if len(self._needs) == len(kept):  # else the files that a retained snapshot needs are not known
            needed = frozenset(files.names).union(*self._needs.values())
            doomed += [name for name in own if name.kind in _NEEDED and str(name) not in needed]
        self._store.delete(map(str, doomed))

    def _name(self, kind: str, number: int) -> str:
        self._serial += self._step
        return str(Name(kind, self._ownership.claim, self._serial, number))

    def _names(self) -> list[Name]:
        """Return all files of the directory; report foreign files once, and leave them out."""
        parsed_names = {text: parsed(text) for text in self._store.names()}
        strays = {text for text, name in parsed_names.items() if name is None} - self._strays
        if strays:
            self._strays |= strays
            text = "%s in %r is no file of a checkpoint, and left alone"
            report(log, "snapshot", text, ", ".join(sorted(strays)), self._store.uri)
        return [name for name in parsed_names.values() if name is not None]


def _snapshots(names: list[Name]) -> list[Name]:
    return sorted((name for name in names if name.kind == "snapshot"), key=lambda name: name.age)


def _names_needed(
    files: LogFiles, optimizers: Mapping[int, str], rows: Sequence[RowFile], parts: Sequence[PartFile]
) -> frozenset[str]:
    of_parts = (name for part in parts for name in (part.name, *part.rows))
    return frozenset((*files.names, *optimizers.values(), *(file.name for file in rows), *of_parts))


def _name_of(text: str) -> Name:
    name = parsed(text)
    assert name is not None, text
    return name


def _require_columns(name: str, header: Mapping[str, Any]) -> None:
    """Raise DamagedError unless the commits of log file ``name`` have the columns of this version."""
    if header.get("columns") != list(COMMIT.names or ()):
        raise DamagedError(
            f"{name} must have commits with the columns {COMMIT.names}. Received: {header.get('columns')}"
        )
