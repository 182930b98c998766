"""The code of each message on the wire."""

from __future__ import annotations

from distkeras.ps.protocol import driver_messages as driver
from distkeras.ps.protocol import messages
from distkeras.ps.protocol import shard_messages as shard

#: Wire code = position. Append only, and raise `framing.VERSION` when a message changes.
#: Each line ends with the code of its first message.
MESSAGES: tuple[type[messages.Message], ...] = (
    messages.Challenge, messages.Answer, messages.Proof, messages.Hello, messages.Pull, messages.Commit,  # 0
    messages.Leave,  # 6
    messages.Welcome, messages.CenterReply, messages.Ack, driver.Publish, messages.FetchModel,  # 7
    messages.ModelFile, driver.Observe,  # 12
    driver.Status, driver.Inspect, driver.Drain, driver.Records, driver.Abort, messages.Fault,  # 14
    messages.Probe,  # 20
    messages.Occupancy, messages.Waiting, driver.EndEarly, driver.ListWorkers, driver.WorkerTable,  # 21
    messages.Heartbeat, driver.Goodbye,  # 26
    messages.KeepOptimizer, messages.FetchOptimizer, messages.KeptOptimizer, messages.OptimizerTaken,  # 28
    driver.PublishRows, driver.RowsPublished, driver.InspectRows,  # 32
    driver.TableRows, driver.BeginMicroBatch, driver.MicroBatchBegun, messages.Announce,  # 35
    messages.Members, messages.PeerVector, messages.PeerLoss,  # 39
    driver.SetValues, driver.RemoveRows, driver.BeginChanges, driver.ChangesBegun,  # 42
    messages.OfferRows, messages.AskForWork, messages.Loan, messages.FetchBatches, messages.SentBatch,  # 46
    shard.DividedCommit, shard.DividedReply, shard.PublishSize, shard.PublishSlice, shard.Greet,  # 51
    shard.SendPart, shard.AskRows, shard.FetchSlice,  # 56
    shard.RegisterShard, shard.ListShards, shard.Shards, shard.TakeTickets, shard.Tickets,  # 59
    shard.PartStored, shard.ShardFault, shard.PartSaved,  # 64
    shard.DividedInspect, shard.DividedRemoval, shard.AskTicket, shard.LatestTicket, shard.ReadRows,  # 67
    shard.AddUp, shard.Total, shard.AskRole, shard.Role,  # 72
)  # fmt: skip
