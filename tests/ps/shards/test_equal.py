"""A center that is divided among shards equals one server, to the bit: each rule, drawn sizes, schedules and deaths."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.ps.divided_center import SMALL_BLOCK, DividedCenter, commit_for

from distkeras.ps.rules import Rule, center_rules, make

#: Every rule that moves element by element, and settings that take other ways.
RULES = [
    *(make(name) for name, kind in center_rules().items() if not kind().reduces),
    make("fedbuff", buffer=2),
    make("mla", reach=0),
    make("ringmaster", threshold=1, patience=2),
    make("dc_asgd", adaptive=True) if "adaptive" in make("dc_asgd").config() else make("dc_asgd"),
]
ACTIONS = ("work", "work", "work", "work", "skip", "die", "lose", "again", "leave", "rate", "lag")


@dataclass
class Run:
    """The workers of a drawn run: what each has to do next."""

    center: DividedCenter
    attempts: dict[int, int] = field(default_factory=dict)
    connections: dict[int, int] = field(default_factory=dict)
    pulled: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    changes: int = 0

    def act(self, action: str, worker: int, steps: int) -> None:
        traits = self.center.rule.traits
        if action == "rate":
            if traits.gradient:
                self.changes += 1
                self.center.set_rate(0.1 / (1 + self.changes), self.changes)
        elif action == "lag":
            self.center.deliver(most=steps)
        elif worker in self.left:
            return
        elif action in ("die", "again") or worker not in self.attempts:
            self._join(worker, new=action == "die" or worker not in self.attempts)
        elif action == "leave":
            self._leave(worker)
        elif action == "lose":
            self._lose(worker, steps)
        elif worker not in self.pulled or traits.pull_first:
            if self._pull(worker) and traits.pull_first:
                self._commit(worker, steps, skip=action == "skip")
        else:
            self._commit(worker, steps, skip=action == "skip")

    def _join(self, worker: int, *, new: bool) -> None:
        self.attempts[worker] = self.attempts.get(worker, -1) + new
        self.connections[worker] = self.connections.get(worker, 0) + 1
        self.pulled.discard(worker)
        self.center.join(worker, self.attempts[worker], self.connections[worker])

    def _lose(self, worker: int, steps: int) -> None:
        """Die when all parts are sent, and the commit is not."""
        commit = commit_for(self.center.one, worker, self.attempts[worker], steps, wants_center=True, overlapped=False)
        self.center.prepare(commit, self.center.payload())
        self._join(worker, new=True)

    def _leave(self, worker: int) -> None:
        for center in (self.center.one, self.center.sequencer):
            center.leave(worker, self.attempts[worker])
        self.left.add(worker)

    def _pull(self, worker: int) -> bool:
        ready = self.center.one.scheduler.ready(worker)
        assert ready == self.center.sequencer.scheduler.ready(worker)
        if ready:
            expected, received = self.center.release(worker, self.attempts[worker])
            np.testing.assert_array_equal(received, expected.buffer.array)
            expected.buffer.drop()
            self.pulled.add(worker)
        return ready

    def _commit(self, worker: int, steps: int, *, skip: bool) -> None:
        one, traits = self.center.one, self.center.rule.traits
        attempt = self.attempts[worker]
        if worker in getattr(one.scheduler, "arrived", ()):
            return  # it waits for the end of its round
        commit = commit_for(
            one, worker, attempt, steps, wants_center=not traits.pull_first, overlapped=traits.overlaps and steps == 2
        )
        if one.moving_statistics.size:
            statistics = self.center.rng.normal(size=one.moving_statistics.size).astype(np.float32)
            commit = replace(commit, moving_statistics=statistics)
        vectors = self.center.payload()
        self.center.prepare(commit, vectors)
        if skip:
            self.center.skip(commit)
            self.pulled.discard(worker)
        elif self.center.commit(commit, vectors) and commit.wants_center:
            self.pulled.discard(worker)
            self._pull(worker)
        elif one.leases[worker].refusals:
            self.pulled.discard(worker)


def run(rule: Rule, workers: int, actions: list[tuple[str, int, int]], **drawn: Any) -> Run:
    rate = 0.05 if rule.traits.gradient else None
    trained = Run(DividedCenter(rule, workers=workers, rate=rate, **drawn))
    for action, worker, steps in actions:
        trained.act(action, worker % workers, steps)
    for worker in range(workers):
        trained.act("work", worker, 1)
    trained.center.assert_equal()
    for shard in trained.center.shards:
        kept = [key for key in shard._parts if key.attempt != trained.attempts[key.worker]]  # noqa: SLF001 - its memory
        assert kept == []
    return trained


drawn_actions = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3), st.integers(1, 3)), min_size=5, max_size=60
)


@pytest.mark.parametrize("rule", RULES, ids=str)
@examples(12)
@given(
    actions=drawn_actions,
    workers=st.integers(1, 4),
    shards=st.integers(1, 5),
    size=st.integers(1, 5 * SMALL_BLOCK + 1),
    moving=st.sampled_from([0, 3]),
    seed=st.integers(0, 1 << 30),
)
def test_a_divided_center_equals_one_server(
    rule: Rule, actions: list[tuple[str, int, int]], workers: int, shards: int, size: int, moving: int, seed: int
) -> None:
    run(rule, workers, actions, shards=shards, size=size, moving=moving, seed=seed)


def test_a_refused_commit_is_one_for_the_shards_too() -> None:
    """Otherwise they would wait for another sequence number than the worker's next one."""
    order = [0, 1, 0, 1, 1, 0, 0, 0]  # both join and pull; the commit of 1 makes that of 0 stale
    actions = [("work", worker, 1) for worker in order]
    trained = run(make("ringmaster", threshold=1, patience=2), 2, actions, shards=3, size=30, moving=0, seed=1)
    assert trained.center.sequencer.refused >= 1
    assert trained.center.sequencer.leases[0].sequence >= 2
