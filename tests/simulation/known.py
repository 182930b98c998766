"""Where planted faults are found: the first schedule for each, or a plan of its own."""

from __future__ import annotations

from simulation.plan import Fault, Plan

#: Faults in what a restart must keep, with the seed of the first schedule that finds each.
OF_STATE = {
    "residuals of a commit are lost": 1,
    "a-window-begins-when-its-worker-joins": 5,
    "an overlapped commit's staleness is its successor's": 19,
    "moving statistics are averaged by workers": 26,
    "steps-are-not-restored": 8,
    "a worker's momentum is restored for another worker": 8,
    "who-leaves-keeps-its-momentum": 8,
    "workers that have ended delay the others": 344,
    "a-restored-ledger-lacks-its-last-commit": 8,
    "a restarted server forgets that the job ends early": 5,
    "states-of-optimizers-are-not-in-snapshots": 26,
    "a-successor-is-given-another-partitions-state": 0,
    "the-first-state-is-kept": 3,
    "a-state-is-sent-once": 3,
    "a-state-is-that-of-a-later-commit": 35,
    "the-last-snapshot-names-older-states": 1299,
    "windows are relative to the slowest worker": 9,
    "a speed outlives its attempt": 95,
    "a-speed-is-measured-from-the-first-center": 1,
    "a-speed-counts-from-the-commit-before": 137,
    "workers-keep-the-longest-window": 29,
    "values-are-not-restored": 8,
    "what the driver sets is saved later": 11,
    "values-are-taken-once": 11,
}

#: Faults that take long to be found, with the seed of the first schedule that finds each; others are searched for from
#: the first schedule on.
LATE = {
    "a buffer is lost when the last worker leaves": 79,
    "a connection that breaks ends the job": 54,
    "a refused window is computed from the next one's rows": 17,
    "a refused worker need not pull": 17,
    "a-buffer-is-drained-for-the-workers-that-come": 965,
    "a-claim-counts-at-once": 6010439,
    "a-claim-is-tried-once": 28,
    "a-commit-that-is-left-out-is-measured": 1,
    "a-damaged-log-costs-the-snapshot": 825,
    "a-drained-buffer-is-divided-by-what-it-holds": 79,
    "a-drained-buffer-of-fadas-is-divided-by-what-it-holds": 258,
    "a-first-server-is-started-once": 56,
    "a-header-waits-for-what-may-follow": 7,
    "a-lease-is-cut-within-the-next-window": 562,
    "a-lost-member-has-sent-nothing": 473,
    "a-lost-refusal-is-taken-for-an-applied-commit": 780,
    "a-member-is-sent-half-a-vector": 40,
    "a-merge-counts-another-step": 80,
    "a-micro-batch-begins-where-the-one-before-ended": 20,
    "a-momentum-begins-again": 973,
    "a-pace-goes-on-over-micro-batches": 691,
    "a-plateau-is-each-members-own": 284,
    "a-port-that-is-taken-is-given-up": 74,
    "a-pull-brings-the-rows-of-the-window-before": 1321,
    "a-refused-commit-counts-its-mini-batches": 17,
    "a-refused-commit-moves-its-rows": 17,
    "a-schedule-begins-with-each-server": 297,
    "a-second-attempt-takes-the-job": 254,
    "a-server-begins-for-a-dead-driver": 1001,
    "a-server-that-stands-still-is-left-alone": 108,
    "a-skipped-commit-moves-its-rows": 741,
    "a-snapshot-forgets-its-micro-batch": 69,
    "a-snapshot-has-the-micro-batch-before": 69,
    "a-task-leaves-before-its-rows-are-trained": 26,
    "an exception ends the saver for good": 127,
    "an-attempt-of-an-earlier-micro-batch-gets-a-lease": 1266,
    "an-early-attempt-does-not-wait": 236,
    "an-old-sessions-end-disconnects-its-successor": 300,
    "any-announcement-is-believed": 464,
    "blocking-exchanges-are-not-cast": 67,
    "buffers-are-drained-twice": 79,
    "changes-are-of-what-was-meant": 74,
    "checksums are not compared": 66,
    "commits-of-members-count-one-by-one": 488,
    "ends-are-not-saved": 172,
    "groups-take-no-turns": 67,
    "late-connections-are-served": 741,
    "loans-are-not-saved": 697,
    "nothing-is-synced": 50,
    "other workers start without the unfinished round": 114,
    "other-rows-are-taken-for-the-same": 741,
    "other-workers-begin-with-the-first-rate": 114,
    "publishing-is-not-tried-again": 54,
    "records-of-earlier-micro-batches-are-drained": 69,
    "refusals-are-not-restored": 741,
    "residuals-of-a-refused-commit-are-lost": 182,
    "the-gap-is-to-the-center-before-the-last": 37,
    "the-state-of-an-earlier-micro-batch-is-reused": 741,
    "turns-begin-again": 384,
    "vectors-take-no-turns": 43,
    "what moves while a driver reads tables is missing": 124,
    "what-a-rule-has-for-a-partition-is-lost": 297,
    "what-was-skipped-before-counts-as-present": 741,
}

#: Two workers whose progress differs much, in a job whose server dies.
BOUNDED = Plan(
    0,
    batches=(6, 6),
    bound=1,
    every=1,
    compute=1.0,
    faults=(Fault("stop worker", 20, amount=15.0, place=1), Fault("kill server", 40)),
)
#: A round that a restart interrupts.
ROUNDS = Plan(
    5,
    workers=3,
    batches=(4, 4, 4),
    rule="ssgd",
    learning_rate=12.0,
    statistics=2,
    every=1,
    compute=1.0,
    faults=(Fault("kill server", 50), Fault("kill server", 90), Fault("kill server", 140)),
)
#: A job with more epochs than the previous one, whose server dies before it has saved a snapshot.
RAISED = Plan(
    7,
    batches=(1, 6),
    raised=1,
    every=1,
    compute=1.0,
    disk=0.01,
    faults=(Fault("kill next server", 32, amount=0.6), Fault("kill driver", 33, amount=1.0)),
)
#: A worker that restarts, with int8.
COARSE = Plan(
    0,
    batches=(6, 6),
    hyper_parameters={"window": 2},
    wire_format="int8",
    rounding=True,
    every=1,
    faults=(Fault("kill server", 29),),
)
#: A driver that requests the table of workers while its server has no center yet.
TABLE_REQUEST = Plan(
    16915,
    batches=(0, 1),
    compute=0.01,
    every=5,
    latency=0.005,
    fragmenting=0.0,
    yielding=0.0,
    disk=0.1,
    lists=True,
    faults=(Fault("vanish", 34, place=1), Fault("stop at start", 9, "w1", 1.0, 1)),
)
#: A driver whose request to set a number is held up in a broken connection, while its next one is answered.
LATE_REQUEST = Plan(
    1,
    yielding=0.3,
    sets=True,
    tables=True,
    faults=(Fault("half cut", 26, amount=2.0, place=1), Fault("disk full", 1, amount=5.0, place=1)),
)
#: A server that dies between the end of a loan and the snapshot that has it, when the rows' owner may have left.
LENT = Plan(
    3,
    batches=(20, 2),
    slow=(4, 1),
    lends=True,
    hyper_parameters={"window": 1},
    compute=0.2,
    every=2,
    disk=0.1,
    faults=(Fault("kill server", 126),),
)
#: Faults that need a plan of their own.
PLANS = {
    "bounded staleness begins with nothing after a restart": BOUNDED,
    "one more than the bound": BOUNDED,
    "a round's moving statistics are not restored": ROUNDS,
    "an unfinished round is not saved": ROUNDS,
    "a restart forgets the epochs that the start asked for": RAISED,
    "partitions-that-have-ended-stay-so": RAISED,
    "residuals outlive their steps": COARSE,
    "a driver's request does not wait for the center": TABLE_REQUEST,
    "a late request of the driver undoes a later one": LATE_REQUEST,
    "a-task-leaves-before-a-snapshot-has-the-loans": LENT,
}

#: Faults in a center that is divided among shards, with the seed of the first schedule with shards that finds each.
OF_SHARDS = {
    "a-worker-commits-before-the-shards-have-its-parts": 0,
    "a-ticket-that-comes-twice-is-applied-twice": 0,
    "a-snapshot-is-written-before-all-shards-have-written": 8,
    "a-part-that-cannot-be-written-is-the-last": 373,
    "a-first-part-that-is-not-wanted-is-copied": 43,
    "a-link-ends-with-its-first-error": 55,
    "a-removed-row-stays-at-its-shard": 17,
    "rows-that-move-while-a-driver-reads-are-missing": 50,
    "changes-are-not-begun-at-the-shards": 50,
    "a-row-is-saved-under-its-place": 41,
    "rows-are-divided-by-another-rule-when-they-are-restored": 75,
    "a-row-of-another-shard-is-sent-as-zeros": 13,
    "a-long-start-of-shards-ends-the-job": 52006259,
}
#: A worker is suspended while it sends a commit, and gets its lease back when it has sent the rest to a shard.
LATE_PART = Plan(
    42,
    batches=(6, 4),
    rule="aeasgd",
    hyper_parameters={"window": 2, "rho": 0.25},
    compute=3.0,
    latency=0.1,
    shards=2,
    faults=(Fault("stop and rival", 42, "w0", 27.0), Fault("kill worker", 54, "w0")),
)
#: Plans for those that need one of their own: also a job that fails, and a shard that stands still.
SHARD_PLANS = {
    "parts-are-identified-without-the-connection": LATE_PART,
    "a-failed-job-has-no-tickets": Plan(1, batches=(4, 4), every=0, shards=2, faults=(Fault("nan", 20),)),
    "a-shard-that-stands-still-is-left-alone": Plan(
        1, batches=(4, 4), shards=2, faults=(Fault("stop shard", 90, amount=600.0, place=1),)
    ),
}
