"""Each rule's commit and release at the center, 19.2 MB, and its bare kernels over the same chunks in a plain loop.

There is no server and no socket: the difference is the center's overhead over the arithmetic. One thread that never
waits is measured by processor time, so that other programs disturb little. New rules are included automatically.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from bench.measure import Case, Factory
from bench.rig import ETA, HISTORY, STEPS
from distkeras.ps.center.center import Center
from distkeras.ps.protocol.messages import Commit
from distkeras.ps.rules import Chunk, Context, Rule, center_rules, make
from distkeras.ps.rules.base import BLOCK

SIZE = 4_798_010
_WORKERS = 2


def cases(quick: bool) -> list[Factory]:
    """Return a case for each rule."""
    return [partial(kernel, name, 8 if quick else 16) for name in center_rules()]


@contextmanager
def kernel(name: str, commits: int) -> Iterator[Case]:
    """Yield the case of the rule ``name``, with its defaults; a run has ``commits`` commits, of two workers in turn."""
    payload = np.random.default_rng(0).normal(scale=1e-3, size=SIZE).astype(np.float32)
    whole, bare = Whole(make(name), payload), Bare(make(name), payload)
    for warming in (whole, bare):
        _rate(warming, 2 * _WORKERS)
    yield Case(
        "ps",
        f"{name}'s arithmetic",
        "commits/processor second",
        lambda: _rate(whole, commits),
        lambda: _rate(bare, commits),
        target_limit=0.7,
    )


def _rate(side: Whole | Bare, commits: int) -> float:
    spent = 0.0
    for commit in range(commits):
        step = side.prepare(commit % _WORKERS)
        began = time.thread_time()
        step()
        spent += time.thread_time() - began
    return commits / spent


class Whole:
    """A center under ``rule`` and its workers; every part of every commit is ``payload``."""

    def __init__(self, rule: Rule, payload: np.ndarray) -> None:
        self._payload, self._parts = payload, rule.traits.parts
        rate = ETA if rule.traits.gradient else None
        self.center = Center(rule, np.zeros_like(payload), workers=_WORKERS, learning_rate=rate)
        for worker in range(_WORKERS):
            self.center.join(worker, 0)
        for worker in range(_WORKERS):
            self.center.release(worker, 0).buffer.drop()

    def prepare(self, worker: int) -> Callable[[], None]:
        """Receive a commit; return a function that applies it and releases the worker."""
        buffers = [self.center.pool.take() for _ in range(self._parts)]
        for buffer in buffers:
            buffer.array[...] = self._payload
        lease = self.center.leases[worker]
        commit = Commit(
            worker=worker,
            attempt=0,
            incarnation=self.center.incarnation,
            sequence=lease.sequence + 1,
            epoch=0,
            first=lease.batch,
            last=lease.batch + STEPS - 1,
            epoch_end=False,
            wants_center=True,
            learning_rate=ETA,
            scale=1.0,
            waited=0.0,
            parts=tuple(buffer.array for buffer in buffers),
            history=HISTORY,
        )

        def step() -> None:
            self.center.commit(commit, buffers)
            self.center.release(worker, 0).buffer.drop()

        return step

    def temporaries(self) -> int:
        """Return the peak of bytes that a commit and its release allocate after the center's pool is full."""
        for commit in range(2 * _WORKERS):
            self.prepare(commit % _WORKERS)()
        steps = [self.prepare(worker) for worker in range(_WORKERS)]
        tracemalloc.start()
        try:
            for step in steps:
                step()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


class Bare:
    """The kernels of ``rule`` over chunks that are cut before the timed run; every part of a commit is ``payload``."""

    def __init__(self, rule: Rule, payload: np.ndarray) -> None:
        traits = rule.traits
        self._rule, self._payload, self._clock = rule, payload, 0
        self._counters: dict[str, int] = {}
        fresh = partial(np.zeros_like, payload)
        center, scratch = fresh(), np.empty(BLOCK, payload.dtype)
        model = tuple(fresh() for _ in traits.model_vectors)
        self._parts = [tuple(fresh() for _ in range(traits.parts)) for _ in range(_WORKERS)]
        self.applied: list[list[Chunk]] = []
        self._viewed: list[list[Chunk]] = []
        for parts in self._parts:
            vectors = {
                "center": center,
                "sent": fresh() if traits.keeps_sent else center,
                "payload": parts,
                "model": model,
                "worker": tuple(fresh() for _ in traits.worker_vectors),
            }
            self.applied.append(_cut(scratch, out=center if traits.view else parts[0], **vectors))
            self._viewed.append(_cut(scratch, out=parts[0], **vectors))

    def prepare(self, worker: int) -> Callable[[], None]:
        """Receive a payload; return a function that applies it."""
        for part in self._parts[worker]:
            part[...] = self._payload
        context = Context(_WORKERS, worker, self._clock, min(1, self._clock), STEPS, ETA, ETA)
        self._clock += 1
        return partial(self._contribute if self._rule.traits.synchronous else self._step, worker, context)

    def _step(self, worker: int, context: Context) -> None:
        rule, chunks = self._rule, self.applied[worker]
        scalars = rule.accept(context, self._counters)
        if rule.reduces:
            scalars = rule.reduced(scalars, sum([rule.partial(chunk, scalars) for chunk in chunks]))
        if not rule.traits.view:
            for chunk in chunks:
                rule.apply(chunk, scalars)
            return
        view_scalars = rule.release(context, self._counters)
        for chunk, viewed in zip(chunks, self._viewed[worker], strict=True):
            rule.apply(chunk, scalars)
            rule.view(viewed, view_scalars)

    def _contribute(self, worker: int, context: Context) -> None:
        """Add a contribution to the round: the first one starts its sum, the last one ends it."""
        rule, (total, *_) = self._rule, self.applied
        rule.accept(context, self._counters)
        if worker > 0:
            for chunk, other in zip(total, self.applied[worker], strict=True):
                np.add(chunk.payload[0], other.payload[0], out=chunk.payload[0])
        if worker == _WORKERS - 1:
            scalars = rule.release(context, self._counters)
            for chunk in total:
                rule.round_end(chunk, _WORKERS, scalars)


def _cut(scratch: np.ndarray, **vectors: np.ndarray | tuple[np.ndarray, ...]) -> list[Chunk]:
    chunks = []
    size = vectors["center"].size  # type: ignore[union-attr]  # always one vector
    for start in range(0, size, BLOCK):
        stretch = slice(start, min(start + BLOCK, size))
        chunk = Chunk()
        chunk.scratch = scratch[: stretch.stop - start]
        for name, value in vectors.items():
            cut = tuple(vector[stretch] for vector in value) if isinstance(value, tuple) else value[stretch]
            setattr(chunk, name, cut)
        chunks.append(chunk)
    return chunks
