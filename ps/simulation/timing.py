"""The times of virtual workers: execution times, and the duration of an exchange."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from distkeras.ps.validate import check_field, check_fields, checked, flag, not_negative, positive, require_number

#: ``draw(worker, steps)``: seconds that ``worker`` takes for ``steps`` local steps, each drawn independently.
Draw = Callable[[int, int], float]


@dataclass(frozen=True)
class Timing(ABC):
    """Execution times of local steps.

    Args:
        mean: mean time of one step, above 0; the papers take the batch size, 128.
    """

    mean: float = positive(128.0)

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def sampler(self, workers: int, rng: np.random.Generator) -> Draw:
        """Return a source of times for ``workers`` workers, which draws from ``rng``."""


@dataclass(frozen=True)
class Gamma(Timing):
    r"""Gamma-distributed times.

    With :math:`\alpha = 1/V^2`, shape :math:`\alpha` and scale mean / :math:`\alpha`:

    * homogeneous: one q of V_task is drawn for the whole run, and each time is of mean q and V_machine;
    * heterogeneous: a p of V_machine is drawn for each machine, and each of its times is of mean p and V_task.

    The paper prints mean = B V^2; its figure (mean 128, 1 % and 27.9 % above 1.25 times it) fits mean = B.

    Args:
        heterogeneous: whether the machines differ. Default False.
        v_task, v_machine: coefficients of variation. Default 0.1, and 0.1 or, heterogeneous, 0.6.

    Reference: Hakimi et al. 2019, Appendix A.4, Algorithms 11 and 12.
    """

    heterogeneous: bool = flag(False)
    v_task: float = positive(0.1)
    v_machine: float | None = positive(None)

    def sampler(self, workers: int, rng: np.random.Generator) -> Draw:
        """Draw the means, one for all machines or one for each, and return a source of times."""
        v_machine = (0.6 if self.heterogeneous else 0.1) if self.v_machine is None else self.v_machine
        once, each = (v_machine, self.v_task) if self.heterogeneous else (self.v_task, v_machine)
        alpha_once, alpha = once**-2, each**-2
        means = rng.gamma(alpha_once, self.mean / alpha_once, workers if self.heterogeneous else 1)
        return _gammas(rng, alpha, np.broadcast_to(means, workers))


@dataclass(frozen=True)
class Memoryless(Timing):
    """Exponentially distributed times: the next worker to commit does not depend on the past."""

    def sampler(self, workers: int, rng: np.random.Generator) -> Draw:
        """Return a source of times that are equally distributed for all workers."""
        return lambda worker, steps: float(rng.exponential(self.mean, steps).sum())


@dataclass(frozen=True)
class SlowWorkers(Timing):
    """A few workers are slower than the rest; times are gamma-distributed around each one's mean.

    Args:
        share: of slow workers, in [0, 1]; rounded up to whole ones. Default 1/16.
        factor: factor by which their steps are slower. Default 10.
        variation: coefficient of variation of each time. Default 0.1.

    Reference: Shi et al. 2024, Section 4 ("average computation time 10 times longer", one worker of sixteen).
    """

    share: float = checked(1 / 16, require_number, inclusive=True, up_to=1)
    factor: float = positive(10.0)
    variation: float = positive(0.1)

    def sampler(self, workers: int, rng: np.random.Generator) -> Draw:
        """Return a source of times; the first workers are the slow ones."""
        slow = int(np.ceil(self.share * workers))
        alpha = self.variation**-2
        means = np.where(np.arange(workers) < slow, self.factor, 1.0) * self.mean
        return _gammas(rng, alpha, means)


def _gammas(rng: np.random.Generator, alpha: float, means: np.ndarray) -> Draw:
    """Return a source of sums of gamma-distributed times of shape ``alpha``, with each worker's mean."""
    scales = (means / alpha).tolist()

    def draw(worker: int, steps: int) -> float:
        if steps == 1:  # the same stream of numbers, without an array
            return float(rng.gamma(alpha, scales[worker]))
        return float(rng.gamma(alpha, scales[worker], steps).sum())

    return draw


@dataclass(frozen=True)
class Communication:
    """The duration of an exchange, in addition to the computation.

    Args:
        latency: seconds for a message to arrive, however small.
        bandwidth: bytes per second of a worker's link; infinite by default.
        service: seconds that the server needs for each exchange; it serves one request at a time.
    """

    latency: float = not_negative(0.0)
    bandwidth: float = math.inf
    service: float = not_negative(0.0)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.bandwidth != math.inf:
            check_field(self, "bandwidth", require_number)

    def transfer(self, size: int) -> float:
        """Return the seconds to send ``size`` bytes in one direction."""
        return self.latency + size / self.bandwidth
