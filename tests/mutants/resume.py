"""Faults in the state that a job continues with after a restart: leases, epochs, averages and momenta."""

from __future__ import annotations

from mutants.mutant import Mutant

LEASES, CENTER_FILE, ROUNDS = "ps/center/leases.py", "ps/center/center.py", "ps/center/center.py"
SNAPSHOTS, OWNERSHIP = "ps/checkpoint/snapshots.py", "ps/checkpoint/ownership.py"
_OF_SNAPSHOT, _OWNERSHIP = ("tests/ps/checkpoint/test_snapshot.py",), ("tests/ps/checkpoint/test_ownership.py",)
_CENTER = ("tests/ps/center",)
#: What a run in virtual time finds within a second or two.
_SIMULATED = ("tests/scripts/test_simulated_state.py",)

RESUME = (
    Mutant(
        "other workers start without the unfinished round",
        CENTER_FILE,
        "            self._end_round(self.round.total, contributions)\n",
        "            self.round.total = None\n",
        "mini-batches that the ledger has are in no center",
        ("tests/ps/checkpoint/test_other_workers.py",),
    ),
    Mutant(
        "other workers begin with a momentum",
        CENTER_FILE,
        "            vector.fill(0.0)\n",
        "            pass\n",
        "the first step of the new partitions has what the old ones' gradients left",
        ("tests/ps/checkpoint/test_other_workers.py",),
    ),
    Mutant(
        "a server's task claims for a dead driver",
        "ps/server/announced.py",
        "            require_driver()\n",
        "            pass\n",
        "a restarted driver loses the job to a task of the driver that died",
        ("tests/training/test_server_task.py",),
    ),
    Mutant(
        "a server in the cluster that has lost its job stays",
        "ps/server/announced.py",
        "                raise OwnershipLostError(fault.message)\n",
        "                pass\n",
        "workers and driver of the lost job ask it forever",
        ("tests/ps/server/test_announced.py",),
    ),
    Mutant(
        "a server in the cluster with a corrupt center stays",
        "ps/server/announced.py",
        "        if server.corrupt:\n",
        "        if False and server.corrupt:\n",
        "no other server continues from the latest snapshot",
        ("tests/ps/server/test_announced.py", "tests/training/test_server_task.py"),
    ),
    Mutant(
        "a server in the cluster without a driver stays",
        "ps/server/announced.py",
        "        elif world.monotonic() - asked > server.deadlines.silence:\n",
        "        elif False:\n",
        "the task of a server whose driver is gone never ends",
        ("tests/ps/server/test_announced.py", "tests/training/test_server_task.py"),
    ),
    Mutant(
        "a second attempt gives up after a tie",
        "ps/server/announced.py",
        "starts < _STARTS and not _has_lost_its_claims(request, world)",
        "starts < _STARTS and not again",
        "of two drivers that resume a job at the same moment, both lose it",
        ("tests/ps/server/test_announced.py",),
    ),
    Mutant(
        "a second attempt has an epoch of its own",
        SNAPSHOTS,
        "            self._require_first(names)\n",
        "            pass\n",
        "a late attempt of a dead driver takes the job from the next driver",
        ("tests/ps/server/test_announced.py",),
    ),
    Mutant(
        "frames are counted modulo 256",
        "ps/protocol/framing.py",
        "        self._frames += 1\n",
        "        self._frames = (self._frames + 1) % 256\n",
        "a frame that was recorded is good again, 256 frames later",
        ("tests/ps/protocol/test_sealing.py",),
    ),
    Mutant(
        "bounded staleness begins with nothing after a restart",
        "ps/center/schedulers.py",
        "        self.iterations |= progress\n",
        "",
        "workers get ahead by the bound and by what they were ahead before",
        _OF_SNAPSHOT,
    ),
    Mutant(
        "a round's moving statistics are not restored",
        "ps/checkpoint/state.py",
        '    current.moving_statistics = np.array(arrays["round/moving_statistics"])\n',
        "",
        "after a restart a mean over a round's steps lacks what was contributed before",
        _OF_SNAPSHOT,
    ),
    Mutant(
        "drafts of newer owners are removed",
        SNAPSHOTS,
        "if name and name.claim < self._ownership.claim)",
        "if name and name.claim != self._ownership.claim)",
        "a server that was replaced removes its successor's snapshot while that is written",
        _OWNERSHIP,
    ),
    Mutant(
        "a successor commits from what its predecessor was sent",
        LEASES,
        "lease.speed = attempt, self._now(), None\n            lease.require_pull()\n",
        "lease.speed = attempt, self._now(), None\n",
        "staleness counts from what another attempt was sent",
        (*_CENTER, *_SIMULATED),
    ),
    Mutant(
        "a partition with more epochs still counts as one that has left",
        "ps/checkpoint/state.py",
        "    if returned:\n        center.take_back()\n",
        "",
        "DANA's view leaves out the momenta of workers that train",
        _OF_SNAPSHOT,
    ),
    Mutant(
        "a window of an elastic rule begins a commit late",
        LEASES,
        "        self.release(clock, at)\n",
        "        self.release(clock - 1, at)\n",
        "a worker that is alone is stale",
        (*_CENTER, *_SIMULATED),
    ),
    Mutant(
        "a round's statistics count each worker once",
        ROUNDS,
        "        self.moving_statistics += commit.moving_statistics * commit.steps\n"
        "        self.steps += commit.steps\n",
        "        self.moving_statistics += commit.moving_statistics\n        self.steps += 1\n",
        "those of a worker with few mini-batches weigh as much as all others'",
        _CENTER,
    ),
    Mutant(
        "the steps of partitions that have ended count in the average",
        CENTER_FILE,
        "        others = sum(self.leases[other].steps for other in self.scheduler.active if other not in own)\n",
        "        others = sum(self.leases[other].steps for other in self.leases if other not in own)\n",
        "moving statistics of a job's last worker hardly move any more",
        _CENTER,
    ),
    Mutant(
        "steps of the latest commits are not saved",
        "ps/checkpoint/state.py",
        '"checksum", "steps", "skipped", "refusals")\n_KEPT',
        '"checksum", "skipped", "refusals")\n_KEPT',
        "after a restart the first worker's moving statistics are everybody's",
        _OF_SNAPSHOT,
    ),
    Mutant(
        "a worker's momentum is restored for another worker",
        "ps/checkpoint/state.py",
        '            vector[...] = arrays[f"worker/{worker}/{number}"]\n',
        '            vector[...] = arrays[f"worker/{min(leases)}/{number}"]\n',
        "after a restart every worker has the first one's momentum",
        _OF_SNAPSHOT,
    ),
    Mutant(
        "residuals of a commit are lost",
        "ps/protocol/compression.py",
        "                kept -= read\n",
        "                kept[...] = 0.0\n",
        "rounding errors of int8 are lost",
        ("tests/ps/protocol/test_compression.py",),
    ),
    Mutant(
        "a commit that is sent again is encoded again",
        "ps/transport/worker_client.py",
        "            if applied:\n                return self._pull(record.wants)\n",
        "            self._format.encode(record.parts)\n"
        "            if applied:\n                return self._pull(record.wants)\n",
        "with int8 it has the residual twice",
        _SIMULATED,
    ),
    Mutant(
        "rows that two partitions compared count once",
        "ps/checkpoint/state.py",
        "    return sum(checksum >> _CRC_BITS for checksum in checksums) % (1 << SUM_BITS)\n",
        "    return sum({checksum >> _CRC_BITS for checksum in checksums}) % (1 << SUM_BITS)\n",
        "a job over partitions of the same rows is not resumed",
        ("tests/ps/checkpoint/test_row_sums.py",),
    ),
    Mutant(
        "a claim without a server is not withdrawn",
        SNAPSHOTS,
        "            self._ownership.withdraw()  # the unused claim must not block another server\n",
        "",
        "two drivers that begin together both give up",
        _OWNERSHIP,
    ),
    Mutant(
        "a driver's request does not wait for the center",
        "ps/server/dispatcher.py",
        "        if self.center is None:\n            self._wait_for_publish(peer)\n",
        "",
        "a callback that asks a server which was just started again ends the job",
        ("tests/ps/server/test_unpublished.py",),
    ),
)
