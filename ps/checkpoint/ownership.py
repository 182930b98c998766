"""The ownership of a checkpoint directory: it belongs to the server with the highest claim.

A cluster manager may start a second driver while the first one is running. Both servers would save, and each would
remove files that the other needs. So before a server restores a snapshot, it claims the directory, with an epoch above
all others, and the previous owner finds that claim before it removes anything. A server that is restarted within its
job keeps the job's epoch, so that it never gets ahead of another job that has taken the directory over:

1. A server writes its claim before it lists the snapshots from which it restores.
2. A server writes a snapshot before it searches for a higher claim. The snapshot is valid only if there is none: then
   workers are informed, and older files removed.
3. The name of each file contains the claim of its writer. No file has two writers, and no server removes the files of
   a higher claim.
4. A server whose driver ends while the claim is being written withdraws it. So an owner that finds another job's higher
   claim first waits until that is withdrawn or its server has written another file; it writes no valid snapshot
   meanwhile.

So of two owners, either the older one finds the newer claim, and its later snapshots are not valid; or it searched
before that claim was written, and the newer owner's list has all valid snapshots. This needs no lock and no conditional
create, only that a list of files shows each file that was complete before: true of local filesystems, HDFS, and the
object stores S3, Google Cloud Storage and Azure Blob.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from distkeras.ps.checkpoint.store import Store
from distkeras.ps.errors import LocalProtocolError, OwnershipLostError, ServerLostError, SnapshotError
from distkeras.ps.transport.client import Address
from distkeras.ps.world.world import REAL, World

_NAME = re.compile(
    r"(owner|server|snapshot|log|optimizer|table|part)-(\d{6,18})-([0-9a-f]{8})(?:[.]([1-9]\d{0,8}))?(?:-(\d{6,18})-(\d{12,18}))?"
)


@dataclass(frozen=True, order=True)
class Claim:
    """One server's claim to a checkpoint directory; the server with the highest claim is the owner.

    Args:
        epoch: of the job, above the `incarnation` of all earlier claims; its driver keeps it for every restart.
        token: of the job, 8 hexadecimal digits; decides between two claims at the same moment.
        start: rises with each restart of the job's server. It is compared last, so a restarted server never gets ahead
            of a job that has taken the directory over meanwhile.
    """

    epoch: int
    token: str
    start: int = 0

    def __str__(self) -> str:
        return f"{self.epoch:06d}-{self.token}" + (f".{self.start}" if self.start else "")

    @property
    def incarnation(self) -> int:
        """A lower bound on the incarnation of the claiming server."""
        return self.epoch + self.start


@dataclass(frozen=True)
class Name:
    """A file's name.

    Args:
        kind: "owner", "server", "snapshot", "log", "optimizer", "table" or "part".
        claim: the claim of its writer, the only server that writes this file.
        serial: rises with each file of a claim; -1 for the kinds "owner" and "server".
        number: clock of a snapshot, number of commits before those of a log file, partition of an optimizer's state,
            number of a table or shard; -1 for the other kinds.
    """

    kind: str
    claim: Claim
    serial: int = -1
    number: int = -1

    def __str__(self) -> str:
        end = "" if self.serial < 0 else f"-{self.serial:06d}-{self.number:012d}"
        return f"{self.kind}-{self.claim}{end}"

    @property
    def age(self) -> tuple[Claim, int]:
        """A sort key: later files sort after earlier ones."""
        return self.claim, self.serial


def parsed(text: str) -> Name | None:
    """Return the parsed name; None if ``text`` is not the name of a checkpoint's file."""
    match = _NAME.fullmatch(text)
    if match is None or (match[1] in ("owner", "server")) != (match[5] is None):
        return None
    kind, epoch, token, start, serial, number = match.groups()
    return Name(kind, Claim(int(epoch), token, int(start or 0)), int(serial or -1), int(number or -1))


#: The number of successive attempts of one job's server whose claims differ even if they claim at the same moment.
ATTEMPTS = 1024
#: The largest number of superseded jobs that a claim lists; the latest ones.
_SUPERSEDED = 64
#: Seconds after which a claim counts although its server has written no other file.
PROVISIONAL_SECONDS = 60.0


class Ownership:
    """One server's claim to a directory; all servers of a job have the same ``token``."""

    def __init__(self, store: Store, token: str, world: World = REAL) -> None:
        self._store = store
        self._token = token
        self._world = world
        self._claim: Claim | None = None
        #: A higher claim that its server may still withdraw, and when it was first found (monotonic).
        self._provisional: tuple[Claim, float] | None = None
        #: Whether the directory was lost to a server that was started for the same job.
        self.lost_to_own_job = False

    def adopt(self, claim: str) -> None:
        """Write under the ``claim`` of another process, which this one belongs to."""
        owner = parsed(f"owner-{claim}")
        if owner is None:
            raise LocalProtocolError(f"`claim` must be that of a checkpoint's owner. Received: {claim!r}")
        self._claim = owner.claim

    @property
    def claim(self) -> Claim:
        """The claim; raise LocalProtocolError before it is written."""
        if self._claim is None:
            raise LocalProtocolError("the checkpoint's directory must be claimed before its claim is read")
        return self._claim

    def write(
        self,
        names: Iterable[Name],
        epoch: int = 0,
        after: int = 0,
        attempt: int | None = None,
        place: Mapping[str, Any] | None = None,
    ) -> None:
        """Claim the directory.

        Args:
            names: all files of the directory.
            epoch: the epoch of the job's claims so far; 0: it has none.
            attempt: the number of this server's attempt, if several may run at a time; None: one at a time runs.
            place: values for the claim's file, such as the address at which this server responds.
        """
        claims = {name.claim for name in names}
        lowest = 0
        if epoch:
            starts = (claim.start for claim in claims if (claim.epoch, claim.token) == (epoch, self._token))
            lowest = 1 + max([after - epoch, *starts])
        else:
            epoch = 1 + max((claim.incarnation for claim in claims), default=0)
        # Two attempts that claim at the same moment do not see each other's claim, and still their claims must differ.
        start = lowest if attempt is None else lowest + (attempt - lowest) % ATTEMPTS
        claim = Claim(epoch, self._token, start)
        header = {"host": socket.gethostname(), "pid": os.getpid(), "time": self._world.time(), **(place or {})}
        header["superseded"] = self._superseded_by(max(claims, default=None), claims)
        self._store.save(str(Name("owner", claim)), header, {})
        self._claim = claim

    def _superseded_by(self, highest: Claim | None, claims: Iterable[Claim]) -> list[str]:
        """Return the tokens of the jobs that a new claim of this job supersedes, the latest last."""
        before = [] if highest is None else self._header(highest).get("superseded", [])
        tokens = [*before, *(claim.token for claim in sorted(claims))]
        return [token for token in dict.fromkeys(tokens) if token != self._token][-_SUPERSEDED:]

    def is_superseded(self, names: Iterable[Name]) -> bool:
        """Return whether the owner's claim states that it has taken the directory from this job."""
        highest = _highest(names)
        return highest is not None and self._token in self._header(highest).get("superseded", [])

    def own_epoch(self, names: Iterable[Name]) -> int:
        """Return the epoch of this job's claims among ``names``, all files of the directory; 0: it has none."""
        return max((name.claim.epoch for name in names if self.is_own(name)), default=0)

    def is_own(self, name: Name) -> bool:
        return name.claim.token == self._token

    def withdraw(self) -> None:
        self._store.delete([str(Name("owner", self.claim))])

    def require_own(self, names: Iterable[Name], epoch: int) -> None:
        """Raise an OwnershipLostError if another job's claim is above this job's claims, which have ``epoch``."""
        self._require_highest(Claim(epoch, self._token), (name for name in names if not self.is_own(name)))

    def require_not_superseded(self, names: list[Name]) -> None:
        """Raise an OwnershipLostError if the owner's claim states that it has taken the directory from this job."""
        highest = _highest(names)
        if highest is not None and self.is_superseded(names):
            raise self._lost("an earlier server of this job", highest)

    def require(self, names: Iterable[Name]) -> None:
        """Raise an OwnershipLostError unless this claim is the highest of ``names``.

        They are all files of the directory, listed after the writes that must be valid.
        """
        self._require_highest(self.claim, names)

    def require_kept(self, names: list[Name]) -> None:
        """As `require`, for a server that serves; raise a SnapshotError while a higher claim may be withdrawn."""
        highest = _highest(names)
        if highest is not None and highest > self.claim and highest.token != self._token:
            now = self._world.monotonic()
            if self._provisional is None or self._provisional[0] != highest:
                self._provisional = highest, now
            confirmed = any(name.claim == highest and name.kind != "owner" for name in names)
            if not confirmed and now - self._provisional[1] < PROVISIONAL_SECONDS:
                raise SnapshotError(f"claim {highest} of {self._owner_text(highest)} may be withdrawn")
        self.require(names)

    def _require_highest(self, own: Claim, names: Iterable[Name]) -> None:
        highest = _highest(names) or own
        if highest > own:
            self.lost_to_own_job = highest.token == self._token
            raise self._lost(f"the server with claim {own}", highest)

    def _lost(self, who: str, highest: Claim) -> OwnershipLostError:
        owner = f"claim {highest} of {self._owner_text(highest)}"
        return OwnershipLostError(f"{who} has lost {self._store.uri!r} to {owner}, which continues the job")

    def _header(self, claim: Claim) -> Mapping[str, Any]:
        """Return the header of a claim's file; an empty mapping if it cannot be read."""
        try:
            return self._store.load(str(Name("owner", claim)))[0]
        except SnapshotError:
            return {}

    def _owner_text(self, claim: Claim) -> str:
        header = self._header(claim)
        if not header:
            return "another server"
        when = datetime.fromtimestamp(header["time"], UTC)
        return f"process {header['pid']} on {header['host']}, since {when:%Y-%m-%d %H:%M:%S} UTC"


@dataclass(frozen=True, repr=False)
class AnnouncedAddress(Address):
    """The address of a server that may be restarted elsewhere; all clients must read its checkpoint, ``uri``."""

    uri: str = ""

    def __str__(self) -> str:
        return f"the address that is announced in {self.uri!r}"

    @property
    def moves(self) -> bool:
        """Return True: the server may move."""
        return True

    def locate(self, world: World = REAL) -> tuple[str, int]:
        """Return the host and port that are announced now; raise a ServerLostError if none are."""
        place = find(self.uri, world)
        return str(place["host"]), int(place["port"])


@dataclass(frozen=True)
class Owner:
    """The owner of a checkpoint's directory, according to the files there.

    Args:
        address: host and port at which the owner responds while it runs; None: its claim names none.
        announced: the values of its `SnapshotDirectory.announce`; None: it has not announced itself yet.
    """

    claim: Claim
    address: tuple[str, int] | None = None
    announced: dict[str, Any] | None = None


def owner_of(uri: str, world: World = REAL) -> Owner | None:
    """Return the owner of a checkpoint's directory, or None; raise SnapshotError if it cannot be read."""
    store = Store(uri, world, create=False)
    names = [name for name in map(parsed, store.names()) if name is not None]
    claim = _highest(names)
    if claim is None:
        return None
    address = store.load(str(Name("owner", claim)))[0].get("address")
    place = store.load(str(Name("server", claim)))[0] if Name("server", claim) in names else None
    return Owner(claim, address and (str(address[0]), int(address[1])), place)


def _highest(names: Iterable[Name]) -> Claim | None:
    return max((name.claim for name in names if name.kind == "owner"), default=None)


def find(uri: str, world: World = REAL) -> dict[str, Any]:
    """Return the announcement of a checkpoint directory's owner; raise ServerLostError if none can be read."""
    missing = f"no parameter server is announced in {uri!r}"
    try:
        owner = owner_of(uri, world)
    except SnapshotError as error:
        raise ServerLostError(f"{missing}: {error.message}") from error
    if owner is None:
        raise ServerLostError(f"{missing}: there is no server's claim")
    if owner.announced is None:
        raise ServerLostError(f"{missing}: the one with claim {owner.claim} has not announced its address yet")
    return owner.announced
