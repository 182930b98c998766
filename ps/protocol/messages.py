"""The messages: frozen types, which `framing` turns into bytes and back.

Numbers are 64-bit on the wire, strings UTF-8, arrays raw little-endian segments behind the fields. A worker's
identity is its partition; ``attempt`` is Spark's task attempt id, which rises with every attempt and fences the
older ones off. ``sequence`` counts a partition's commits from 1; 0 stands for "none yet".
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np

from distkeras.ps.errors import ERRORS, DistkerasError, RemoteProtocolError
from distkeras.ps.protocol.tables import NO_IDS, Ids
from distkeras.ps.rules.base import Vector

#: Arrays of any length. One of another dtype is refused by both ends.
Bytes = Annotated[np.ndarray, np.dtype("u1")]
Floats = Annotated[np.ndarray, np.dtype("<f4")]
Rows = Annotated[np.ndarray, np.dtype("<f8"), "rows"]  # of two dimensions

NO_FLOATS = np.empty(0, np.float32)
NO_ROWS = np.empty((0, 0), np.float64)
NO_BYTES = np.empty(0, np.uint8)

#: History columns that every row has, before the metrics: seconds since the epoch (UTC), and samples.
FIXED_HISTORY = ("timestamp", "samples")


@dataclass(frozen=True, eq=False)
class CommitRecord:
    """A payload, and the mini-batches ``first``…``last`` of ``epoch`` from which it was computed.

    Args:
        epoch_end: whether ``last`` is the epoch's last mini-batch.
        wants_center: whether the reply is the center, and not a bare acknowledgement.
        learning_rate: the worker optimizer's; 0 for gradient rules.
        scale: mean scale factor that the worker's half of the rule applied.
        parts, moving_statistics: the payload, and the replica's moving statistics; float32.
        history: float64 ``(steps, columns)``, a row a mini-batch: `FIXED_HISTORY`, then each metric; or `NO_ROWS`.
        checksum: of the rows up to the last mini-batch.
        overlapped: computed while the commit before this one traveled, from the reply to the one before that.
        touched: the rows that the window touched, an array for each table, strictly ascending.
        moved: the payload at those rows, flat float32 ``(rows * width,)``, an array for each table.
        wants: the rows that the reply is to have, those of the next window; an array for each table, as ``touched``.
    """

    epoch: int
    first: int
    last: int
    epoch_end: bool
    wants_center: bool
    learning_rate: float
    scale: float
    parts: tuple[Floats, ...]
    moving_statistics: Floats = field(default_factory=lambda: NO_FLOATS)
    history: Rows = field(default_factory=lambda: NO_ROWS)
    checksum: int = 0
    overlapped: bool = False
    touched: tuple[Ids, ...] = ()
    moved: tuple[Floats, ...] = ()
    wants: tuple[Ids, ...] = ()

    @property
    def steps(self) -> int:
        """The local steps of the payload."""
        return self.last - self.first + 1


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """The state of a worker's optimizer.

    Args:
        layout: names the optimizer and the variables behind ``content``; only an optimizer of the same layout loads it.
        content: the bytes of all its variables, one after the other.
        checksum: CRC-32 of ``content``.
    """

    layout: str
    content: Bytes
    checksum: int

    @property
    def damaged(self) -> bool:
        """Return whether the checksum is not that of the content."""
        return zlib.crc32(self.content.data) != self.checksum


@dataclass(frozen=True, eq=False)
class Message:
    """Base of all messages."""


@dataclass(frozen=True, eq=False)
class LeaseMessage(Message):
    """Base of what the holder of a partition's lease sends, with the server's incarnation that it knows."""

    worker: int
    attempt: int
    incarnation: int


@dataclass(frozen=True, eq=False)
class Challenge(Message):
    """Server → client: prove the key over this nonce (32 bytes).

    ``whole``: from then on tags cover the long vectors of commits and of the center, too: see `framing.Seal`.
    """

    nonce: Bytes
    whole: bool = False


@dataclass(frozen=True, eq=False)
class Answer(Message):
    """Client → server: the proof, and a nonce for the server's own."""

    nonce: Bytes
    proof: Bytes


@dataclass(frozen=True, eq=False)
class Proof(Message):
    """Server → client: this server holds the key too."""

    proof: Bytes


@dataclass(frozen=True, eq=False)
class Hello(Message):
    """Asks for the lease of a partition. ``metrics`` are the history's column names, joined by newlines.

    ``wire_format``, one of `compression.FORMATS`, is that of commits and replies on this connection. ``connection``
    rises each time that the attempt asks: what it had sent over an older connection, and arrives late, is refused.
    ``tables`` is what `tables.describe` says of the tables that the worker knows. ``memory`` is where a server on the
    same host finds memory for the vectors of this connection, and ``memory_token`` the bytes that are there, in
    hexadecimal digits: see `shared_slots`. Empty: the worker shares none. ``micro_batch`` is the number of the stream's
    micro-batch that the partition is of; -1: the job trains no stream.
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


@dataclass(frozen=True, eq=False)
class Pull(LeaseMessage):
    """Asks for the center, and for the rows ``wants`` of each table, which are strictly ascending."""

    wants: tuple[Ids, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Commit(CommitRecord, Message):
    """A `CommitRecord`, and its sender.

    ``waited`` is how long the worker waited for the reply to its previous exchange, in seconds; ``passed`` the share of
    its epoch that the partition has passed, as far as the worker knows. If the wire format is not float32, ``packed``
    has the parts, and ``parts`` is empty.

    ``grouped``: the relay of a group sends one commit for its workers. The payload is the sum of theirs, ``companions``
    has the others' identities and mini-batches (`protocol.companions`), and ``history`` their rows behind its own.
    """

    worker: int
    attempt: int
    incarnation: int
    sequence: int
    waited: float = 0.0
    passed: float = 0.0
    packed: tuple[Bytes, ...] = ()
    grouped: bool = False
    companions: Ids = field(default_factory=lambda: NO_IDS)

    @classmethod
    def of(
        cls,
        record: CommitRecord,
        *,
        worker: int,
        attempt: int,
        incarnation: int,
        sequence: int,
        waited: float = 0.0,
        passed: float = 0.0,
        packed: tuple[np.ndarray, ...] = (),
    ) -> Commit:
        """Return the commit that sends ``record``; ``packed`` replaces its parts."""
        commit = object.__new__(cls)  # a frozen dataclass would set twenty-four fields one by one
        vars(commit).update(vars(record), worker=worker, attempt=attempt, incarnation=incarnation)
        vars(commit).update(sequence=sequence, waited=waited, passed=passed, grouped=False, companions=NO_IDS)
        vars(commit).update(packed=packed, parts=() if packed else record.parts)
        return commit

    @property
    def payload_bytes(self) -> int:
        """The bytes of the payload on the wire."""
        return sum([part.nbytes for part in self.packed or self.parts]) + self.row_bytes

    @property
    def row_bytes(self) -> int:
        """The bytes of the rows that the commit moves, and of their numbers; part of `payload_bytes`."""
        return sum([array.nbytes for array in (*self.touched, *self.moved)]) if self.touched else 0

    @property
    def rows_moved(self) -> int:
        """The number of rows that the commit moves, of all tables."""
        return sum([ids.size for ids in self.touched]) if self.touched else 0

    @property
    def rows_wanted(self) -> int:
        """The number of rows that the reply is to have, of all tables."""
        return sum([ids.size for ids in self.wants]) if self.wants else 0


@dataclass(frozen=True, eq=False)
class Probe(Message):
    """Asks whether the server applies commits of other workers now."""


@dataclass(frozen=True, eq=False)
class Heartbeat(Message):
    """Keeps the lease of a worker that computes; answered by an `Ack` at once."""


@dataclass(frozen=True, eq=False, kw_only=True)
class KeepOptimizer(OptimizerState, Message):
    """Worker → server: the optimizer's state after commit ``sequence``; with peers, ahead of it. Answer: `Ack`."""

    worker: int
    attempt: int
    incarnation: int
    sequence: int


@dataclass(frozen=True, eq=False)
class FetchOptimizer(LeaseMessage):
    """Worker → server: send the optimizer's state that is kept of this partition."""


@dataclass(frozen=True, eq=False, kw_only=True)
class KeptOptimizer(OptimizerState, Message):
    """Server → worker: the state that ``attempt`` had after commit ``sequence``; 0: none is kept."""

    attempt: int
    sequence: int


@dataclass(frozen=True, eq=False)
class OptimizerTaken(LeaseMessage):
    """Worker → server: the kept state after commit ``sequence`` is loaded; or it is not, because of ``problem``.

    Answered by an `Ack`, and reported as an event.
    """

    sequence: int
    problem: str = ""


@dataclass(frozen=True, eq=False)
class Leave(LeaseMessage):
    """Says that the partition's data has ended, and everything is committed."""


@dataclass(frozen=True, eq=False)
class Welcome(Message):
    """Gives the lease: the worker continues after commit ``sequence``, at mini-batch ``batch`` of ``epoch``.

    ``checksum`` came with that commit; -1 before the first one. ``durable`` is the last commit that a snapshot covers.
    ``held`` says that this attempt had the lease already, and no other one since. If the partition has ``finished``,
    no attempt holds its lease any more. ``skipped`` says that commit ``sequence`` was left out for its numbers;
    ``refused`` that it was refused, and its mini-batches remain; ``stopping`` that the job ends early, and what is left
    of the data is not trained on. ``optimizer`` is the commit after which the optimizer's state was sent that is kept
    of this partition; 0: none is kept. ``shares`` says that the server has mapped the memory of the `Hello`.
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


@dataclass(frozen=True, eq=False)
class Parked(Message):
    """Says that another attempt holds the partition's lease and is alive: ask again."""


@dataclass(frozen=True, eq=False)
class CenterReply(Message):
    """The center, or the rule's view of it, at ``clock``. ``learning_rate`` is the server's eta (gradient rules).

    ``stopping`` asks the worker to leave now that its commit is applied. ``window`` is the steps of its next window,
    where windows follow the workers' speeds; 0: as before.

    If the wire format is not float32, ``center`` may be empty and ``packed`` hold it instead; with one that needs error
    feedback (int8), its change since the reply before on the same connection. The first reply then has ``center``
    itself, and so has the answer to a `Pull`.

    ``rows`` are those that the request wanted, of each table, flat, as they are at ``clock``. To a driver, ``moved``
    says which they are.
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


@dataclass(frozen=True, eq=False)
class Ack(Message):
    """Says that commit ``sequence`` is applied, or that a message without a number was received.

    ``skipped``: the commit was left out for its numbers, and the worker must begin again with a pull. ``refused``: its
    worker must pull, and compute the same mini-batches again. ``window``: see `CenterReply`.
    """

    incarnation: int
    clock: int
    sequence: int
    durable: int
    skipped: bool = False
    stopping: bool = False
    refused: bool = False
    window: int = 0


@dataclass(frozen=True, eq=False)
class Occupancy(Message):
    """Says whether the server has commits of others that it has received and not yet applied."""

    occupied: bool


@dataclass(frozen=True, eq=False)
class Publish(Message):
    """Driver → server: the job's initial center, its statistics, and the model file that workers ask for.

    A server that was restored from a snapshot takes the model file only. ``names`` says which arrays they consist of,
    for the texts of errors: see `layout.encode`.
    """

    center: Floats
    moving_statistics: Floats = field(default_factory=lambda: NO_FLOATS)
    model: Bytes = field(default_factory=lambda: NO_BYTES)
    names: Bytes = field(default_factory=lambda: NO_BYTES)


@dataclass(frozen=True, eq=False)
class PublishRows(Message):
    """Driver → server: the initial rows of table number ``table`` from ``start`` on, flat; answered by `RowsPublished`.

    They come before `Publish`, the blocks of a table one after the other. Of a table whose touched rows alone are kept,
    ``ids`` says which rows these are.
    """

    table: int
    start: int
    rows: Floats
    ids: Ids = field(default_factory=lambda: NO_IDS)


@dataclass(frozen=True, eq=False)
class RowsPublished(Message):
    """Server → driver: the table's rows below ``rows`` are there; all of them at a server that was restored."""

    rows: int


@dataclass(frozen=True, eq=False)
class InspectRows(Message):
    """Driver → server: send ``count`` rows of table number ``table`` from ``start`` on."""

    table: int
    start: int
    count: int


@dataclass(frozen=True, eq=False)
class TableRows(Message):
    """Server → driver: the rows, flat, as they are at ``clock``.

    Of a table whose touched rows alone are kept, these are the next ones of those, with their numbers ``ids``, and
    fewer than were asked for at the end.
    """

    clock: int
    rows: Floats
    ids: Ids = field(default_factory=lambda: NO_IDS)


@dataclass(frozen=True, eq=False)
class BeginMicroBatch(Message):
    """Driver → server: let the partitions begin with micro-batch ``number`` of a stream, if they have not yet.

    Answered by `MicroBatchBegun`.
    """

    stream: str
    number: int


@dataclass(frozen=True, eq=False)
class MicroBatchBegun(Message):
    """Server → driver: the micro-batch has begun at ``clock``, before commit record number ``records``.

    ``began`` says that it begins now. Else it had begun before, and ``complete`` says that all of it counts already.
    """

    clock: int
    records: int
    began: bool
    complete: bool


@dataclass(frozen=True, eq=False)
class FetchModel(Message):
    """Worker → server: send the model file."""


@dataclass(frozen=True, eq=False)
class ModelFile(Message):
    """Server → worker: the model file of `Publish`."""

    model: Bytes


@dataclass(frozen=True, eq=False)
class Observe(Message):
    """Driver → server: answer when more than ``clock`` commits are applied, or after ``patience`` seconds."""

    clock: int
    patience: float


@dataclass(frozen=True, eq=False)
class Status(Message):
    """Server → driver: progress. ``loss`` and ``staleness`` are means over the latest commits.

    ``epochs`` is the mean over the partitions of the epochs that each has passed, with the share of its present epoch
    that its worker knows. ``saved_clock`` is the clock of the server's latest snapshot, which was taken
    ``saved_seconds`` ago; -1 and NaN: there is none.
    """

    clock: int
    joined: int
    finished: int
    batches: int
    samples: int
    loss: float
    staleness: float
    epochs: float = 0.0
    saved_clock: int = -1
    saved_seconds: float = math.nan


@dataclass(frozen=True, eq=False)
class Inspect(Message):
    """Driver → server: send the center as it is now, on behalf of no worker.

    ``moved_after`` asks for the rows of whole tables that commits after that clock have moved as well; -1: for none.
    ``wants`` asks for rows of tables whose touched rows alone are kept: an array for each table, strictly ascending,
    empty for whole tables; no array at all: for none.
    """

    moved_after: int = -1
    wants: tuple[Ids, ...] = ()


@dataclass(frozen=True, eq=False)
class Drain(Message):
    """Driver → server: send the commit records from number ``start`` on, at most ``count``."""

    start: int
    count: int


@dataclass(frozen=True, eq=False)
class Records(Message):
    """Server → driver: commit records (bytes of `commit_log.COMMIT`) with the history rows behind them, in order.

    ``metrics`` are the history's column names; ``total`` is how many commit records there are, and ``missing`` how many
    mini-batches are behind others that were lost.
    """

    total: int
    missing: int
    metrics: str
    commits: Bytes
    history: Rows


@dataclass(frozen=True, eq=False)
class Abort(Message):
    """Driver → server: end the job; every worker's next request is answered by a `Fault`."""

    reason: str


@dataclass(frozen=True, eq=False)
class EndEarly(Message):
    """Driver → server: end the job successfully; every worker is asked, with the next reply, to leave."""

    reason: str


@dataclass(frozen=True, eq=False)
class Goodbye(Message):
    """Driver → server: this is the last request; the server may end."""


@dataclass(frozen=True, eq=False)
class ListWorkers(Message):
    """Driver → server: send the worker table."""


@dataclass(frozen=True, eq=False)
class WorkerTable(Message):
    """Server → driver: a row for each partition that has joined and has data left.

    A row has worker, attempt, last commit, and the seconds since that commit, or since the attempt joined; 0 while the
    worker waits for an answer.
    """

    rows: Rows


@dataclass(frozen=True, eq=False)
class Announce(LeaseMessage):
    """Worker → server: this member is ready to train, and others find it at ``host`` and ``port``.

    ``node`` names the machine. ``batches`` is the number of mini-batches that an epoch of its partition has (rules with
    peers). ``lost`` is the line of `Members` of a relay that the worker has lost; empty: of none.
    """

    host: str
    port: int
    node: str
    batches: int = 0
    lost: str = ""

    @property
    def line(self) -> str:
        """The line of `Members` of this member."""
        return f"{self.worker} {self.host} {self.port}"


@dataclass(frozen=True, eq=False)
class Members(Message):
    """Server → worker: all have announced themselves.

    ``places`` has a line for each member, "worker host port" by rank: node by node, with equally many of each of the
    ``nodes``; none where the job ends early. ``batches`` is the number of steps that an epoch has, that of the member
    with the most mini-batches. ``whole`` is as in `Challenge`.

    To the worker of a group, ``places`` has the members of its group alone, the relay first.
    """

    places: str
    nodes: int
    batches: int
    whole: bool = False

    def rows(self, worker: int) -> tuple[tuple[int, str, int], ...]:
        """Return worker, host and port of each line; or raise a RemoteProtocolError for ``worker``."""
        try:
            lines = [line.split(" ") for line in self.places.split("\n")]
            return tuple((int(number), host, int(port)) for number, host, port in lines)
        except ValueError:
            raise RemoteProtocolError(
                f"members must be worker, host and port, a line each. Received: {self.places!r}", worker=worker
            ) from None


@dataclass(frozen=True, eq=False)
class PeerVector(Message):
    """Member → member: a vector of step ``step``, counted from 0 over all epochs.

    ``purpose`` is one of `members.Purpose`. ``members`` says how many gradients it is the sum of, and ``learning_rate``
    the rate of the step with them. ``packed`` has the vector as bfloat16 in place of ``vector``, if it is not empty.
    """

    purpose: int
    step: int
    vector: Floats
    members: int = 1
    learning_rate: float = 0.0
    packed: Bytes = field(default_factory=lambda: NO_BYTES)


@dataclass(frozen=True, eq=False)
class PeerLoss(Message):
    """Member → member: the sum of the losses of ``samples`` samples in the epoch that ends with step ``step``."""

    step: int
    total: float
    samples: float


@dataclass(frozen=True, eq=False)
class Fault(Message):
    """An error, as its position in `errors.ERRORS`; from a worker it ends the job. In numbers, -1 means none."""

    code: int
    message: str
    worker: int = -1
    column: str = ""
    step: int = -1
    traceback: str = ""


#: Wire code = position. Append only, and raise `framing.VERSION` when a message changes.
MESSAGES: tuple[type[Message], ...] = (
    Challenge,
    Answer,
    Proof,
    Hello,
    Pull,
    Commit,
    Leave,
    Welcome,
    CenterReply,
    Ack,
    Publish,
    FetchModel,
    ModelFile,
    Observe,
    Status,
    Inspect,
    Drain,
    Records,
    Abort,
    Fault,
    Probe,
    Occupancy,
    Parked,
    EndEarly,
    ListWorkers,
    WorkerTable,
    Heartbeat,
    Goodbye,
    KeepOptimizer,
    FetchOptimizer,
    KeptOptimizer,
    OptimizerTaken,
    PublishRows,
    RowsPublished,
    InspectRows,
    TableRows,
    BeginMicroBatch,
    MicroBatchBegun,
    Announce,
    Members,
    PeerVector,
    PeerLoss,
)


#: A traceback longer than this is cut in the middle, to stay below a frame's bound.
_LONGEST_TRACEBACK = 32 * 1024


def fault_of(error: DistkerasError) -> Fault:
    """Return the message of ``error``."""
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


@dataclass(frozen=True, eq=False)
class PullRequest:
    """Asks for a `Reply` with the center, and the rows ``wants`` of each table."""

    wants: tuple[Ids, ...] = ()


class PostRequest(NamedTuple):
    """Asks to send ``commit``, and goes on at once; a `CollectRequest` gets its reply."""

    commit: CommitRecord


class CollectRequest:
    """Asks for the `Reply` to the commit that was posted last."""


class ProbeRequest:
    """Asks for a `Reply` that says whether the server is occupied."""


class KeepRequest(NamedTuple):
    """Wants ``state``, after the latest commit (``ahead``: after the next one), kept for a later attempt; gets None."""

    state: OptimizerState
    ahead: bool = False


class FetchRequest:
    """Wants a `Reply` with the kept state of the optimizer."""


class TakenRequest(NamedTuple):
    """Reports to the server whether the kept state was used: it is loaded, or ``problem`` says why not; gets None."""

    problem: str


class Compute(NamedTuple):
    """Says that ``steps`` local steps follow; a simulation lets their time pass first."""

    steps: int


class Reply(NamedTuple):
    """The answer to a request. ``center`` is None for a bare acknowledgement, and immutable otherwise.

    ``occupied`` answers a `ProbeRequest`. ``stopping`` asks the loop to end, once what it has computed is committed.
    ``optimizer`` answers a `FetchRequest`; None: no state is kept.
    ``refused``: the commit was refused, and its window is to be computed again, from ``center``.
    ``window`` is the steps of the next window, if above 0.
    ``rows`` are those that were wanted of each table, flat.
    """

    learning_rate: float = 0.0
    center: Vector | None = None
    moving_statistics: np.ndarray = NO_FLOATS
    occupied: bool = False
    stopping: bool = False
    optimizer: OptimizerState | None = None
    refused: bool = False
    window: int = 0
    rows: tuple[np.ndarray, ...] = ()


Request = (
    PullRequest
    | CommitRecord
    | PostRequest
    | CollectRequest
    | ProbeRequest
    | Compute
    | KeepRequest
    | FetchRequest
    | TakenRequest
)
Loop = Generator[Request, Reply | None, None]
