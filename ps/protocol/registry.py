"""The code of each message on the wire."""

from __future__ import annotations

from distkeras.ps.protocol.messages import (
    Abort,
    Ack,
    Announce,
    Answer,
    AskForWork,
    BeginChanges,
    BeginMicroBatch,
    CenterReply,
    Challenge,
    ChangesBegun,
    Commit,
    Drain,
    EndEarly,
    Fault,
    FetchBatches,
    FetchModel,
    FetchOptimizer,
    Goodbye,
    Heartbeat,
    Hello,
    Inspect,
    InspectRows,
    KeepOptimizer,
    KeptOptimizer,
    Leave,
    ListWorkers,
    Loan,
    Members,
    Message,
    MicroBatchBegun,
    ModelFile,
    Observe,
    Occupancy,
    OfferRows,
    OptimizerTaken,
    PeerLoss,
    PeerVector,
    Probe,
    Proof,
    Publish,
    PublishRows,
    Pull,
    Records,
    RemoveRows,
    RowsPublished,
    SentBatch,
    SetValues,
    Status,
    TableRows,
    Waiting,
    Welcome,
    WorkerTable,
)
from distkeras.ps.protocol.shard_messages import (
    AddUp,
    AskRole,
    AskRows,
    AskTicket,
    DividedCommit,
    DividedInspect,
    DividedRemoval,
    DividedReply,
    FetchSlice,
    Greet,
    LatestTicket,
    ListShards,
    PartSaved,
    PartStored,
    PublishSize,
    PublishSlice,
    ReadRows,
    RegisterShard,
    Role,
    SendPart,
    ShardFault,
    Shards,
    TakeTickets,
    Tickets,
    Total,
)

#: Wire code = position. Append only, and raise `framing.VERSION` when a message changes.
MESSAGES: tuple[type[Message], ...] = (
    *(Challenge, Answer, Proof, Hello, Pull, Commit, Leave),  # from 0
    *(Welcome, CenterReply, Ack, Publish, FetchModel, ModelFile, Observe),  # from 7
    *(Status, Inspect, Drain, Records, Abort, Fault, Probe),  # from 14
    *(Occupancy, Waiting, EndEarly, ListWorkers, WorkerTable, Heartbeat, Goodbye),  # from 21
    *(KeepOptimizer, FetchOptimizer, KeptOptimizer, OptimizerTaken, PublishRows, RowsPublished, InspectRows),  # from 28
    *(TableRows, BeginMicroBatch, MicroBatchBegun, Announce, Members, PeerVector, PeerLoss),  # from 35
    *(SetValues, RemoveRows, BeginChanges, ChangesBegun),  # from 42
    *(OfferRows, AskForWork, Loan, FetchBatches, SentBatch),  # from 46
    *(DividedCommit, DividedReply, PublishSize, PublishSlice, Greet, SendPart, AskRows, FetchSlice),  # from 51
    *(RegisterShard, ListShards, Shards, TakeTickets, Tickets, PartStored, ShardFault, PartSaved),  # from 59
    *(DividedInspect, DividedRemoval, AskTicket, LatestTicket, ReadRows, AddUp, Total, AskRole, Role),  # from 67
)
