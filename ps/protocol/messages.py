"""The messages: frozen types, which `framing` turns into bytes and back.

Numbers are 64-bit on the wire, strings UTF-8, arrays raw little-endian segments after the fields. A worker is
identified by its partition; ``attempt`` is Spark's task attempt id, which rises with every attempt.
``sequence`` counts a partition's commits from 1; 0 means that there is none yet.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, dataclass_transform

import numpy as np

from distkeras.ps.errors import ERRORS, DistkerasError, RemoteProtocolError
from distkeras.ps.protocol.loop import (
    NO_BYTES,
    NO_FLOATS,
    NO_ROWS,
    Bytes,
    CommitRecord,
    Floats,
    OptimizerState,
    Rows,
    column,
)
from distkeras.ps.protocol.tables import NO_IDS, Ids


@dataclass_transform(frozen_default=True, eq_default=False)
class Message:
    """Base of all messages: each subclass is a frozen dataclass."""

    def __init_subclass__(cls, *, kw_only: bool = False) -> None:
        dataclass(frozen=True, eq=False, kw_only=kw_only)(cls)


class LeaseMessage(Message):
    """Base of the requests that need the partition's lease; ``incarnation`` is that of the server that was joined."""

    worker: int
    attempt: int
    incarnation: int


class Challenge(Message):
    """Server → client: prove the key over this nonce (32 bytes)."""

    nonce: Bytes


class Answer(Message):
    """Client → server: the client's proof, and a nonce for the server's proof."""

    nonce: Bytes
    proof: Bytes


class Proof(Message):
    """Server → client: this server holds the key too."""

    proof: Bytes


class Hello(Message):
    """Requests the lease of a partition. ``metrics`` are the history's column names, joined by newlines.

    ``wire_format``, one of `compression.FORMATS`, is that of commits and replies on this connection. ``connection``
    rises with each request of the attempt: late messages from its older connections are refused. ``tables`` is the
    `tables.describe` of the worker's tables. ``memory`` is the place of shared memory for the vectors of this
    connection, which a server on the same host can map, and ``memory_token`` its token, in hexadecimal digits: see
    `shared_slots`. Empty: the worker shares none. ``micro_batch`` is the number of the partition's micro-batch; -1: the
    job trains no stream.
    """

    worker: int
    attempt: int
    size: int
    moving_statistics: int
    metrics: str = ""
    wire_format: str = "float32"
    connection: int = 0
    tables: str = ""
    memory: str = ""
    memory_token: str = ""
    micro_batch: int = -1


class Pull(LeaseMessage):
    """Requests the center, and the rows ``wants`` of each table, which are strictly ascending."""

    wants: tuple[Ids, ...] = ()


#: The fields that are equal in all commits of a group.
OF_GROUP = ("wants_center", "overlapped", "incarnation", "grouped")


class Commit(CommitRecord, Message, kw_only=True):
    """A `CommitRecord`, and its sender.

    ``waited`` is how long the worker waited for the reply to its previous exchange, in seconds; ``passed`` is the
    completed share of the partition's epoch, as known to the worker. If the wire format is not float32, ``packed``
    has the encoded parts, and ``parts`` is empty.

    ``grouped``: the relay of a group sends one commit for its workers. The payload is the sum of their payloads,
    ``companions`` has the other workers' identities and mini-batches (`protocol.companions`), and ``history`` has the
    relay's rows, then theirs.

    A further field needs only its declaration here: the wire, the commits of groups, the log of commits and its tables
    derive their formats from this class. A number has one for each worker of a group, unless it is in `OF_GROUP`.
    """

    worker: int = field(metadata=column("worker"))
    attempt: int = field(metadata=column("attempt"))
    incarnation: int = field(metadata=column("incarnation"))
    sequence: int = field(metadata=column("sequence"))
    waited: float = field(default=0.0, metadata=column("wait"))
    passed: float = 0.0
    packed: tuple[Bytes, ...] = ()
    grouped: bool = False
    companions: Ids = field(default_factory=lambda: NO_IDS)

    @classmethod
    def of(cls, record: CommitRecord, *, packed: tuple[np.ndarray, ...] = (), **sender: Any) -> Commit:
        """Return the commit that sends ``record``; ``packed`` replaces its parts, ``sender`` has the further fields."""
        commit = object.__new__(cls)  # the constructor of a frozen dataclass takes three times as long
        vars(commit).update(_OWN_DEFAULTS | vars(record) | sender)  # a record may be a commit that is sent again
        vars(commit).update(packed=packed, parts=() if packed else record.parts)
        return commit

    @property
    def payload_bytes(self) -> int:
        return sum([part.nbytes for part in self.packed or self.parts]) + self.row_bytes

    @property
    def row_bytes(self) -> int:
        """The bytes of the rows that the commit moves and of their numbers; included in `payload_bytes`."""
        return sum([array.nbytes for array in (*self.touched, *self.moved)]) if self.touched else 0

    @property
    def rows_moved(self) -> int:
        return sum([ids.size for ids in self.touched]) if self.touched else 0

    @property
    def rows_wanted(self) -> int:
        """The number of rows that the reply must contain, of all tables."""
        return sum([ids.size for ids in self.wants]) if self.wants else 0


#: The defaults of a commit's own fields, as the constructor has them.
_OWN_DEFAULTS = {
    own.name: own.default if own.default_factory is MISSING else own.default_factory()
    for own in fields(Commit)[len(fields(CommitRecord)) :]
    if (own.default, own.default_factory) != (MISSING, MISSING)
}


class Probe(Message):
    """Worker → server: are commits of other workers being applied now?"""


class Heartbeat(Message):
    """Worker → server: keep the lease of a worker that is computing. It is answered by an `Ack` at once."""


class KeepOptimizer(OptimizerState, Message, kw_only=True):
    """Worker → server: the optimizer's state after commit ``sequence``; with peers, ahead of it. Answer: `Ack`."""

    worker: int
    attempt: int
    incarnation: int
    sequence: int


class FetchOptimizer(LeaseMessage):
    """Worker → server: send the optimizer state that is kept for this partition."""


class KeptOptimizer(OptimizerState, Message, kw_only=True):
    """Server → worker: the optimizer state of ``attempt`` after commit ``sequence``; 0: none is kept."""

    attempt: int
    sequence: int


class OptimizerTaken(LeaseMessage):
    """Worker → server: the kept state after commit ``sequence`` was loaded, or not because of ``problem``: an event."""

    sequence: int
    problem: str = ""


class Leave(LeaseMessage):
    """Worker → server: the partition's data has ended, and everything is committed."""


class Welcome(Message):
    """Grants the lease: the worker continues after commit ``sequence``, at mini-batch ``batch`` of ``epoch``.

    ``checksum`` is that of commit ``sequence``; -1 before the first one. ``durable`` is the last commit that a snapshot
    covers. ``held``: this attempt already had the lease, and no other attempt has held it since. ``finished``: the
    partition's data has ended, and no attempt holds its lease. ``skipped``: commit ``sequence`` was skipped for a NaN
    or infinity. ``refused``: it was refused, and its mini-batches must be committed again. ``stopping``: the job ends
    early, and the remaining data is not trained on. ``optimizer`` is the sequence number of the kept optimizer state;
    0: none is kept. ``shares``: the server has mapped the memory of the `Hello`. ``owes``: the partition's own part has
    ended, and its task must send the rows of the others. For ``end_epoch`` see `Ack`.
    """

    incarnation: int
    clock: int
    sequence: int
    durable: int
    epoch: int
    batch: int
    finished: bool
    held: bool = False
    checksum: int = -1
    skipped: bool = False
    stopping: bool = False
    optimizer: int = 0
    refused: bool = False
    shares: bool = False
    owes: bool = False
    end_epoch: int = -1
    end_batch: int = 0


class Waiting(Message):
    """Another attempt holds the partition's lease and is alive: the worker must ask again."""


class CenterReply(Message):
    """The center, or the rule's view of it, at ``clock``. ``learning_rate`` is the server's eta (gradient rules).

    ``stopping`` asks the worker to leave; its commit is applied. ``window`` is the steps of its next window, if windows
    follow the workers' speeds; 0: unchanged.

    If the wire format is not float32, ``center`` may be empty, and ``packed`` contains it encoded. With a format that
    needs error feedback (int8), ``packed`` contains its change since the previous reply on the same connection; then
    the first reply, and each reply to a `Pull`, has ``center``.

    ``rows`` are the requested rows of each table, flat, at ``clock``. For a driver, ``moved`` has their numbers.

    ``values`` are the numbers that the driver has set (see `SetValues`), of which ``version`` is the version; 0: none,
    or the worker has them.
    """

    incarnation: int
    clock: int
    sequence: int
    durable: int
    learning_rate: float
    center: Floats
    moving_statistics: Floats = field(default_factory=lambda: NO_FLOATS)
    stopping: bool = False
    packed: Bytes = field(default_factory=lambda: NO_BYTES)
    window: int = 0
    rows: tuple[Floats, ...] = ()
    moved: tuple[Ids, ...] = ()
    version: int = 0
    values: Rows = field(default_factory=lambda: NO_ROWS)
    end_epoch: int = -1
    end_batch: int = 0


class Ack(Message):
    """Commit ``sequence`` is applied, or a message without a sequence number was received.

    ``skipped``: the commit was skipped for a NaN or infinity, and the worker must begin again with a pull. ``refused``:
    the worker must pull, and compute the same mini-batches again. ``window``: see `CenterReply`. Mini-batch
    ``end_batch`` of ``end_epoch`` is the first that the worker must not train: another one does; -1: there is none.
    """

    incarnation: int
    clock: int
    sequence: int
    durable: int
    skipped: bool = False
    stopping: bool = False
    refused: bool = False
    window: int = 0
    end_epoch: int = -1
    end_batch: int = 0


class Occupancy(Message):
    """Server → worker: whether commits of other workers are received and not yet applied."""

    occupied: bool


class FetchModel(Message):
    """Worker → server: send the model file."""


class ModelFile(Message):
    """Server → worker: the model file of `Publish`."""

    model: Bytes


class Announce(LeaseMessage):
    """Worker → server: this member is ready to train, and others reach it at ``host`` and ``port``.

    ``node`` names the machine. ``batches`` is the number of mini-batches in an epoch of its partition (rules with
    peers). ``lost`` is the line in `Members` of a relay that the worker has lost; empty: none.
    """

    host: str
    port: int
    node: str
    batches: int = 0
    lost: str = ""

    @property
    def line(self) -> str:
        return f"{self.worker} {self.host} {self.port}"


class Members(Message):
    """Server → worker: all members have announced themselves.

    ``places`` has a line for each member, "worker host port" by rank: node by node, equally many for each of the
    ``nodes``; it is empty if the job ends early. ``batches`` is the number of steps in an epoch, that of the member
    with the most mini-batches.

    For a worker of a group, ``places`` has only the members of its group, the relay first.
    """

    places: str
    nodes: int
    batches: int

    def rows(self, worker: int) -> tuple[tuple[int, str, int], ...]:
        """Return worker, host and port of each line; raise RemoteProtocolError for ``worker`` if a line is invalid."""
        try:
            lines = [line.split(" ") for line in self.places.split("\n")]
            return tuple((int(number), host, int(port)) for number, host, port in lines)
        except ValueError:
            raise RemoteProtocolError(
                f"members must be worker, host and port, a line each. Received: {self.places!r}", worker=worker
            ) from None


class PeerVector(Message):
    """Member → member: a vector of step ``step``, counted from 0 over all epochs.

    ``purpose`` is one of `members.Purpose`. ``members`` is the number of gradients in a sum, and ``learning_rate`` that
    of the step with it. If ``packed`` is not empty, it has the vector as bfloat16, and ``vector`` is empty.
    """

    purpose: int
    step: int
    vector: Floats
    members: int = 1
    learning_rate: float = 0.0
    packed: Bytes = field(default_factory=lambda: NO_BYTES)


class PeerLoss(Message):
    """Member → member: the sum of the losses of ``samples`` samples in the epoch that ends with step ``step``."""

    step: int
    total: float
    samples: float


class OfferRows(Message):
    """Worker → server: the rows of its partition are all read, and other workers get them at ``host`` and ``port``.

    An epoch has ``batches`` mini-batches, and the job ``epochs`` epochs. ``checksum`` is that of all rows.
    """

    worker: int
    attempt: int
    host: str
    port: int
    batches: int
    epochs: int
    checksum: int


class AskForWork(Message):
    """Worker → server: the lease of this worker has ended; is there a loan for it? Answered by a `Loan`, after a wait.

    ``lost`` is the partition whose rows it could not get from ``host`` and ``port``; -1: none.
    """

    worker: int
    attempt: int
    lost: int = -1
    host: str = ""
    port: int = 0


class Loan(Message):
    """Server → worker: the lease ``number`` is promised to it; its rows are those of ``partition``.

    An epoch of the partition has ``batches`` mini-batches, which the worker gets at ``host`` and ``port``. With -1 as
    its number, there is none: the worker asks again, or, if it is ``over``, leaves.
    """

    number: int = -1
    partition: int = -1
    batches: int = 0
    host: str = ""
    port: int = 0
    over: bool = False


class FetchBatches(Message):
    """Worker → worker: send ``count`` mini-batches from number ``batch`` of ``epoch`` on, and none after the end."""

    epoch: int
    batch: int
    end_epoch: int
    end_batch: int
    count: int


class SentBatch(Message):
    """Worker → worker: a mini-batch. ``layout`` describes its ``arrays``: see `row_links.layout_of`."""

    epoch: int
    batch: int
    last: bool
    checksum: int
    layout: str
    arrays: tuple[Bytes, ...]


class Fault(Message):
    """An error, as its position in `errors.ERRORS`; from a worker it ends the job. In numbers, -1 means none."""

    code: int
    message: str
    worker: int = -1
    column: str = ""
    step: int = -1
    traceback: str = ""


#: A traceback longer than this is cut in the middle, to stay below a frame's bound.
_LONGEST_TRACEBACK = 32 * 1024


def fault_of(error: DistkerasError) -> Fault:
    return Fault(
        code=ERRORS.index(type(error)),
        message=_shortened(error.message),
        worker=-1 if error.worker is None else error.worker,
        column=error.column or "",
        step=-1 if error.step is None else error.step,
        traceback=_shortened(error.remote_traceback or ""),
    )


def error_of(fault: Fault) -> DistkerasError:
    """Return the error of ``fault``; an unknown code is a `RemoteProtocolError`."""
    kind = ERRORS[fault.code] if 0 <= fault.code < len(ERRORS) else RemoteProtocolError
    return kind(
        fault.message,
        worker=None if fault.worker < 0 else fault.worker,
        column=fault.column or None,
        step=None if fault.step < 0 else fault.step,
        remote_traceback=fault.traceback or None,
    )


def _shortened(text: str) -> str:
    half = _LONGEST_TRACEBACK // 2
    cut = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return text if len(text) <= _LONGEST_TRACEBACK else cut
