"""Rules with an optimizer at the server, computed independently in float64 from what workers sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np

#: Rules that are computed here.
OUTER = ("delay_adaptive", "delayed_nesterov", "diloco", "fadas", "fedbuff", "fedopt", "mla", "ringmaster")
#: Those that buffer movements.
BUFFERED = ("fadas", "fedbuff")


class Outer:
    """The state of a server's optimizer, and its steps.

    Args:
        rule: one of `OUTER`.
        workers: number of workers of the job.
        vectors: vectors of the center, in the rule's order.
        counters: counters of the rule.
    """

    def __init__(self, rule: Any, workers: int, vectors: Sequence[np.ndarray], counters: Mapping[str, int]) -> None:
        self._rule, self._workers = rule, workers
        self.vectors = [vector.astype(np.float64) for vector in vectors]
        self.counters = dict(counters)

    def move(self, center: np.ndarray, delta: np.ndarray, clock: int, staleness: int) -> Any:
        """Return the center after a commit of ``delta`` that is applied at ``clock``."""
        match self._rule.name:
            case "fadas" | "fedbuff":
                return self._hold(center, delta, clock, clock - staleness)
            case "delay_adaptive":
                limit = self._rule.threshold or self._workers
                return center + min(1.0, limit / max(1, staleness)) * delta
            case "ringmaster":
                limit = self._rule.threshold or 2 * self._workers
                return center + min(1.0, limit / max(1, staleness)) * delta
            case "mla":
                return center + self._looking_ahead(delta)
            case "delayed_nesterov":
                return center + self._delayed(delta)
        raise LookupError(f"a rule must have its formula here. Received: {self._rule.name}")

    def _hold(self, center: np.ndarray, delta: np.ndarray, clock: int, began: int) -> Any:
        """Return the center after a movement that the buffer takes."""
        size, count = self._rule.buffer or self._workers, self.counters.get("count", 0)
        late = max(0, ceil((clock - count - began) / size))
        if self._rule.name == "fedbuff":
            delta = (1 + late) ** -float(self._rule.exponent) * delta
        else:
            self.counters["worst"] = max(late, self.counters.get("worst", 0))
        self.vectors[0] = self.vectors[0] + delta
        self.counters["count"] = count + 1
        return self.drain(center) if count + 1 == size else center

    def drain(self, center: np.ndarray) -> Any:
        """Return the center after a step with the contents of the buffer, if there are any."""
        if self._rule.name not in BUFFERED or not self.counters.get("count", 0):
            return center
        mean, worst = self.vectors[0] / (self._rule.buffer or self._workers), self.counters.get("worst", 0)
        self.vectors[0], self.counters = np.zeros_like(mean), {}
        if self._rule.name == "fedbuff":
            return center + self._weighted(mean)
        limit = self._rule.delay_threshold
        share = 1 / worst if limit is not None and worst > limit else 1.0
        return center + share * self._amsgrad(mean)

    def _weighted(self, mean: np.ndarray) -> Any:
        rate, beta = float(self._rule.server_rate), float(self._rule.momentum)
        if not beta:
            return rate * mean
        m = self.vectors[1] = beta * self.vectors[1] + mean
        return rate * (mean + beta * m if self._rule.nesterov else m)

    def _amsgrad(self, mean: np.ndarray) -> Any:
        rate, memory, decay = float(self._rule.server_rate), float(self._rule.beta_1), float(self._rule.beta_2)
        _, m, v, largest = self.vectors
        m, v = memory * m + (1 - memory) * mean, decay * v + (1 - decay) * mean**2
        self.vectors[1:] = m, v, np.maximum(largest, v)
        return rate * m / (np.sqrt(self.vectors[3]) + float(self._rule.epsilon))

    def _looking_ahead(self, delta: np.ndarray) -> Any:
        rate, gamma = float(self._rule.server_rate), float(self._rule.momentum)
        m = self.vectors[0] = gamma * self.vectors[0] + (1 - gamma) * delta
        return rate * (delta + gamma * m)

    def _delayed(self, delta: np.ndarray) -> Any:
        n, rate, beta = self._rule.period or self._workers, float(self._rule.server_rate), float(self._rule.momentum)
        c, (m, total), count = float(self._rule.activation) / n, self.vectors, self.counters.get("count", 0) + 1
        total = total + delta
        if count < n:
            self.vectors[1], self.counters["count"] = total, count
            return rate * (delta / n + c * beta * m)
        m = beta * m + total / n
        self.vectors, self.counters["count"] = [m, np.zeros_like(m)], 0
        return rate * (delta / n + (1 - c * n + c) * beta * m)

    def end_round(self, center: np.ndarray, mean: np.ndarray) -> Any:
        """Return the center after a round with the mean movement ``mean``."""
        match self._rule.name:
            case "diloco":
                return center + self._with_momentum(mean)
            case "fedopt":
                return center + self._adaptive(mean)
        raise LookupError(f"a rule with rounds must have its formula here. Received: {self._rule.name}")

    def _with_momentum(self, mean: np.ndarray) -> Any:
        rate, beta = float(self._rule.server_rate), float(self._rule.momentum)
        m = self.vectors[0] = beta * self.vectors[0] + mean
        return rate * (mean + beta * m if self._rule.nesterov else m)

    def _adaptive(self, mean: np.ndarray) -> Any:
        rate, memory, decay = float(self._rule.server_rate), float(self._rule.beta_1), float(self._rule.beta_2)
        m = self.vectors[0] = memory * self.vectors[0] + (1 - memory) * mean
        v, square, form = self.vectors[1], mean**2, self._rule.form
        if form == "adagrad":
            v = v + square
        elif form == "yogi":
            v = v - (1 - decay) * square * np.sign(v - square)
        else:
            v = decay * v + (1 - decay) * square
        self.vectors[1] = v
        if form == "amsgrad":
            v = self.vectors[2] = np.maximum(self.vectors[2], v)
        return rate * m / (np.sqrt(v) + float(self._rule.epsilon))
