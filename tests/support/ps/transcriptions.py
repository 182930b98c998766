"""Each update rule as in its paper, in plain numpy: the reference for the product's rules.

A transcription shares no code with the product. It receives a `Problem` and the rule's hyper-parameters, and yields
the center after each commit, or after each round if the rule is synchronous. ``t`` is the clock, ``k`` the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, sqrt
from typing import Any

import numpy as np

from distkeras.ps.rules import Rule
from distkeras.ps.simulation.simulate import simulate
from distkeras.ps.simulation.virtual_job import Trace

Vector = np.ndarray
Centers = Iterator[Vector]


class Problem:
    """A quadratic of coupled coordinates whose gradient has noise that depends on the worker and its step.

    Args:
        n: the number of workers.
        schedule: the workers in the order of their commits.
        eta: the learning rate at each clock.
        weight_decay: the weight decay in the transcriptions of gradient rules.
    """

    def __init__(
        self,
        n: int,
        schedule: Sequence[int],
        *,
        eta: Callable[[int], float] | float = 0.05,
        weight_decay: float = 0.0,
        size: int = 5,
        seed: int = 0,
    ) -> None:
        self._seed = seed
        rng = np.random.default_rng(seed)
        root = rng.normal(size=(size, size)) / sqrt(size)
        self.n, self.schedule, self.weight_decay = n, list(schedule), weight_decay
        self.eta = eta if callable(eta) else lambda clock: eta
        self.matrix = root @ root.T + 0.1 * np.eye(size)
        self.start = rng.normal(size=size)
        self._noise = [np.random.default_rng((seed, worker)) for worker in range(n)]
        self._queue = [np.random.default_rng((seed, worker, 1)) for worker in range(n)]
        #: The points at which each worker computed its gradients, and the gradients.
        self.points: list[list[Vector]] = [[] for _ in range(n)]
        self.gradients: list[list[Vector]] = [[] for _ in range(n)]

    def g(self, k: int, theta: Vector) -> Vector:
        """Return the next mini-batch gradient of worker ``k``."""
        gradient = self.matrix @ theta + 0.3 * self._noise[k].normal(size=theta.size)
        self.points[k].append(theta.copy())
        self.gradients[k].append(gradient)
        return gradient + self.weight_decay * theta

    def numbered(self, k: int, theta: Vector, batch: int) -> Vector:
        """Return the gradient of mini-batch ``batch`` of worker ``k``, the same each time."""
        return self.matrix @ theta + 0.3 * np.random.default_rng((self._seed, k, 2, batch)).normal(size=theta.size)

    def occupied(self, k: int) -> bool:
        """Return whether the server is occupied at the next probe of worker ``k``."""
        return bool(self._queue[k].random() < 0.6)

    def rounds(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the clock at which each round begins, and its workers in the order of their arrival."""
        for t in range(0, len(self.schedule), self.n):
            yield t, self.schedule[t : t + self.n]

    def simulated(self, rule: Rule, **options: Any) -> Trace:
        """Return the product's run of the same problem, with all centers."""
        options.setdefault("learning_rate", self.eta(0))
        options.setdefault("numbered", rule.may_refuse)
        plain, numbered = (lambda theta, worker: self.g(worker, theta)), self.numbered
        return simulate(
            rule,
            self.start,
            (lambda theta, worker, batch: numbered(worker, theta, batch)) if options["numbered"] else plain,
            workers=self.n,
            schedule=self.schedule,
            occupied=lambda worker, clock: self.occupied(worker),
            keep_centers=True,
            **options,
        )


# Hermans 2017


def _window(job: Problem, k: int, theta: Vector, steps: int) -> Vector:
    """Return the accumulated steps of one window of Algorithm 7's worker that begins at ``theta``."""
    accumulated = np.zeros_like(theta)
    for _ in range(steps):
        step = -job.eta(0) * job.g(k, theta)
        accumulated = accumulated + step
        theta = theta + step
    return accumulated


def downpour(job: Problem, window: int = 1) -> Centers:
    center, pulled = job.start, [job.start] * job.n
    for k in job.schedule:
        center = center + _window(job, k, pulled[k], window)
        pulled[k] = center
        yield center


def zealous_downpour(job: Problem, window: int, explore: bool = False) -> Centers:
    center, pulled = job.start, [job.start] * job.n
    for k in job.schedule:
        theta, g = pulled[k], np.zeros_like(center)
        for i in range(window):
            step = -job.eta(0) * job.g(k, theta)
            g = g + step
            if explore:
                theta = theta + step
            if i == window - 1 or not job.occupied(k):
                break
        center = center + g
        pulled[k] = center
        yield center


def agn(job: Problem, window: int) -> Centers:
    center, pulled = job.start, [job.start] * job.n
    for k in job.schedule:
        center = center + _window(job, k, pulled[k], window) / window
        pulled[k] = center
        yield center


def dynsgd(job: Problem, window: int) -> Centers:
    center, pulled, last_pull = job.start, [job.start] * job.n, [0] * job.n
    for t, k in enumerate(job.schedule):
        tau = t - last_pull[k]
        center = center + _window(job, k, pulled[k], window) / (tau + 1)
        pulled[k], last_pull[k] = center, t + 1
        yield center


def adag(
    job: Problem, window: int, form: str = "4.7", gamma: float = 1e-4, algorithm: int = 12, normalize: bool = True
) -> Centers:
    center, origin = job.start, [job.start] * job.n
    for k in job.schedule:
        delta = _window(job, k, origin[k], window) / (window if normalize else 1)
        d = center - origin[k]
        s: Any = {
            "4.1": 1 / (d**2 / job.eta(0) + 1),
            "4.7": 1 / (d**2 / gamma + 1),
            "4.10": 1 / ((d / gamma) ** 2 + 1),
            "4.1norm": 1 / (np.linalg.norm(d) ** 2 / job.eta(0) + 1),
            "4.7norm": 1 / (np.linalg.norm(d) ** 2 / gamma + 1),
        }[form]
        before, center = center, center + s * delta
        origin[k] = before if algorithm == 13 else center
        yield center


def aeasgd(job: Problem, window: int, rho: float) -> Centers:
    return eamsgd(job, window, rho, momentum=0.0)


def eamsgd(job: Problem, window: int, rho: float, momentum: float) -> Centers:
    v: list[Any] = [0.0] * job.n
    center, theta, eta = job.start, [job.start] * job.n, job.eta(0)
    for k in job.schedule:
        for _ in range(window):
            v[k] = momentum * v[k] - eta * job.g(k, theta[k] + momentum * v[k])
            theta[k] = theta[k] + v[k]
        elastic = eta * rho * (theta[k] - center)
        theta[k] = theta[k] - elastic
        center = center + elastic
        yield center


def easgd(job: Problem, window: int, rho: float, early_stopping: str | None = None) -> Centers:
    center, theta, eta, norm = job.start, [job.start] * job.n, job.eta(0), np.linalg.norm
    for _, arrivals in job.rounds():
        pulled = center
        for k in arrivals:
            for _ in range(window):
                g, apart = job.g(k, theta[k]), theta[k] - pulled
                theta[k] = theta[k] - eta * g
                if early_stopping == "2.9" and norm(eta * g) <= norm(eta * rho * apart):
                    break
                if early_stopping == "2.10" and norm(eta * g) - norm(eta * rho * apart) < eta:
                    break
            elastic = eta * rho * (theta[k] - pulled)
            theta[k] = theta[k] - elastic
            center = center + elastic
        yield center


def averaging(job: Problem, window: int) -> Centers:
    center = job.start
    for _, arrivals in job.rounds():
        center = np.mean([center + _window(job, k, center, window) for k in arrivals], axis=0)
        yield center


# Shi et al. 2024; the learning rate of a synchronous rule is that of the round's beginning


def ssgd(job: Problem) -> Centers:
    w = job.start
    for t, arrivals in job.rounds():
        w = w - job.eta(t) / job.n * sum(job.g(k, w) for k in arrivals)
        yield w


def ssgdm(job: Problem, momentum: float) -> Centers:
    w, u, before = job.start, np.zeros_like(job.start), job.eta(0)
    for t, arrivals in job.rounds():
        eta, sent = job.eta(t), w
        u = eta / before * u
        for number, k in enumerate(arrivals):
            if number == 0:
                w, u = w - momentum * u, momentum * u
            g = job.g(k, sent)
            w, u = w - eta * g, u + eta * g
        before = eta
        yield w


def ssgdm_local(job: Problem, momentum: float) -> Centers:
    w, u, before = job.start, [np.zeros_like(job.start)] * job.n, job.eta(0)
    for t, arrivals in job.rounds():
        eta, sent = job.eta(t), w
        for k in arrivals:
            u[k] = momentum * eta / before * u[k] + eta * job.g(k, sent)
            w = w - u[k]
        before = eta
        yield w


def asgdm(job: Problem, momentum: float) -> Centers:
    w, u, sent = job.start, np.zeros_like(job.start), [job.start] * job.n
    for t, k in enumerate(job.schedule):
        u = job.eta(t) / job.eta(max(0, t - 1)) * u
        u = momentum * u + job.eta(t) * job.g(k, sent[k])
        w = w - u
        sent[k] = w
        yield w


def shifted_momentum(job: Problem, momentum: float) -> Centers:
    w, sent = job.start, [job.start] * job.n
    u, eta, before = [np.zeros_like(job.start)] * job.n, [job.eta(0)] * job.n, [job.eta(0)] * job.n
    for t, k in enumerate(job.schedule):
        u[k] = momentum * eta[k] / before[k] * u[k] + eta[k] * job.g(k, sent[k])
        w = w - u[k]
        sent[k], before[k], eta[k] = w, eta[k], job.eta(t + 1)  # The worker receives eta with the parameters.
        yield w


def ormo(job: Problem, momentum: float) -> Centers:
    w, u, b, ite, sent = job.start, np.zeros_like(job.start), 0, [0] * job.n, [job.start] * job.n
    for t, k in enumerate(job.schedule):
        u = job.eta(t) / job.eta(max(0, t - 1)) * u
        if ceil(t / job.n) > b:
            w, u, b = w - momentum * u, momentum * u, b + 1
        g, e = job.g(k, sent[k]), b - ceil(ite[k] / job.n)
        u = u + job.eta(t) * momentum**e * g
        w = w - job.eta(t) * (1 - momentum ** (e + 1)) / (1 - momentum) * g
        sent[k], ite[k] = w, t + 1
        yield w


def smega2(job: Problem, momentum: float) -> Centers:
    n, w, big_m, s, c = job.n, job.start, np.zeros_like(job.start), np.zeros_like(job.start), 0
    sent = [w] * n
    for t, k in enumerate(job.schedule):
        g = job.g(k, sent[k])
        w = w - job.eta(t) * (g + momentum * big_m)
        s, c = s + g, (c + 1) % n
        if c == 0:
            big_m, s = momentum * big_m + s / n, np.zeros_like(s)
        sent[k] = w - job.eta(t) * momentum * ((n + c * (momentum - 1)) * big_m + c / n * s)
        yield w


# Hakimi et al. 2019 and Zheng et al. 2017


def asgd(job: Problem) -> Centers:
    theta, sent = job.start, [job.start] * job.n
    for t, k in enumerate(job.schedule):
        theta = theta - job.eta(t) * job.g(k, sent[k])
        sent[k] = theta
        yield theta


def nag_asgd(job: Problem, momentum: float, ahead: int = 0) -> Centers:
    theta, v, sent = job.start, np.zeros_like(job.start), [job.start] * job.n
    for t, k in enumerate(job.schedule):
        v = momentum * v + job.g(k, sent[k])
        theta = theta - job.eta(t) * v
        sent[k] = theta - ahead * job.eta(t) * v
        yield theta


def lwp(job: Problem, momentum: float) -> Centers:
    return nag_asgd(job, momentum, ahead=job.n - 1)


def multi_asgd(job: Problem, momentum: float) -> Centers:
    theta, v, sent = job.start, [np.zeros_like(job.start)] * job.n, [job.start] * job.n
    for t, k in enumerate(job.schedule):
        v[k] = momentum * v[k] + job.g(k, sent[k])
        theta = theta - job.eta(t) * v[k]
        sent[k] = theta
        yield theta


def dana_zero(job: Problem, momentum: float) -> Centers:
    return dana_dc(job, momentum, compensation=0.0)


def dana_dc(job: Problem, momentum: float, compensation: float) -> Centers:
    theta, v, sent = job.start, [np.zeros_like(job.start)] * job.n, [job.start] * job.n
    for t, k in enumerate(job.schedule):
        g = job.g(k, sent[k])
        g = g + compensation * g * g * (theta - sent[k])
        v[k] = momentum * v[k] + g
        theta = theta - job.eta(t) * v[k]
        sent[k] = theta - job.eta(t) * momentum * sum(v)
        yield theta


def dana_slim(job: Problem, momentum: float) -> Centers:
    shifted, v, sent = job.start, [np.zeros_like(job.start)] * job.n, [job.start] * job.n
    for t, k in enumerate(job.schedule):
        g = job.g(k, sent[k])
        v[k] = momentum * v[k] + g
        shifted = shifted - job.eta(t) * (momentum * v[k] + g)
        sent[k] = shifted
        yield shifted


def dc_asgd(
    job: Problem,
    adaptive: bool = False,
    compensation: float = 0.04,
    decay: float = 0.95,
    epsilon: float = 1e-7,
    momentum: float = 0.0,
) -> Centers:
    theta, v, backup = job.start, [np.zeros_like(job.start)] * job.n, [job.start] * job.n
    mean_square = np.zeros_like(job.start)
    for t, k in enumerate(job.schedule):
        g = job.g(k, backup[k])
        mean_square = decay * mean_square + (1 - decay) * g * g
        strength = compensation / np.sqrt(mean_square + epsilon) if adaptive else compensation
        v[k] = momentum * v[k] + g + strength * g * g * (theta - backup[k])
        theta = theta - job.eta(t) * v[k]
        backup[k] = theta
        yield theta


# Outer optimizers: the papers subtract a pseudo-gradient g, the window's first parameters minus its last ones


def _pseudo_gradient(job: Problem, k: int, theta: Vector, window: int) -> Vector:
    return -_window(job, k, theta, window)


def diloco(
    job: Problem, window: int, server_rate: float = 0.7, momentum: float = 0.9, nesterov: bool = True
) -> Centers:
    theta, m = job.start, np.zeros_like(job.start)
    for _, arrivals in job.rounds():
        g = np.mean([_pseudo_gradient(job, k, theta, window) for k in arrivals], axis=0)
        m = momentum * m + g
        theta = theta - server_rate * (g + momentum * m if nesterov else m)
        yield theta


def fedopt(
    job: Problem,
    window: int,
    form: str = "adam",
    server_rate: float = 0.01,
    beta_1: float = 0.9,
    beta_2: float = 0.99,
    epsilon: float = 1e-3,
) -> Centers:
    theta, m, v, v_hat = job.start, *(np.zeros_like(job.start) for _ in range(3))
    for _, arrivals in job.rounds():
        d = np.mean([_window(job, k, theta, window) for k in arrivals], axis=0)
        m = beta_1 * m + (1 - beta_1) * d
        v = {
            "adam": beta_2 * v + (1 - beta_2) * d**2,
            "amsgrad": beta_2 * v + (1 - beta_2) * d**2,
            "yogi": v - (1 - beta_2) * d**2 * np.sign(v - d**2),
            "adagrad": v + d**2,
        }[form]
        v_hat = np.maximum(v_hat, v)
        theta = theta + server_rate * m / (np.sqrt(v_hat if form == "amsgrad" else v) + epsilon)
        yield theta


def delayed_nesterov(
    job: Problem,
    window: int,
    server_rate: float = 0.7,
    momentum: float = 0.9,
    period: int | None = None,
    activation: float = 0.0,
) -> Centers:
    theta, m, total, p, sent = job.start, np.zeros_like(job.start), np.zeros_like(job.start), 0, [job.start] * job.n
    n = period or job.n
    c = activation / n
    for k in job.schedule:
        g = _pseudo_gradient(job, k, sent[k], window)
        total, p = total + g, p + 1
        if p < n:
            theta = theta - server_rate * (g / n + c * momentum * m)
        else:
            m = momentum * m + total / n
            theta = theta - server_rate * (g / n + (1 - c * n + c) * momentum * m)
            total, p = np.zeros_like(total), 0
        sent[k] = theta
        yield theta


def mla(job: Problem, window: int, server_rate: float = 0.7, momentum: float = 0.9, reach: float = 0.0) -> Centers:
    theta, m, sent = job.start, np.zeros_like(job.start), [job.start] * job.n
    for k in job.schedule:
        g = _pseudo_gradient(job, k, sent[k], window)
        m = momentum * m + (1 - momentum) * g
        theta = theta - server_rate * (g + momentum * m)
        sent[k] = theta - reach * server_rate * momentum * m
        yield theta


def delay_adaptive(job: Problem, window: int = 1, threshold: int | None = None) -> Centers:
    theta, sent, ite, limit = job.start, [job.start] * job.n, [0] * job.n, threshold or job.n
    for t, k in enumerate(job.schedule):
        tau = t - ite[k]
        g = _pseudo_gradient(job, k, sent[k], window)
        theta = theta - (g if tau <= limit else limit / tau * g)
        sent[k], ite[k] = theta, t + 1
        yield theta


def fedbuff(
    job: Problem,
    window: int,
    buffer: int | None = None,
    server_rate: float = 1.0,
    exponent: float = 0.5,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> Centers:
    versions, m, held, size = [job.start], np.zeros_like(job.start), list[Vector](), buffer or job.n
    sent = [0] * job.n  # The version of each worker's parameters.
    for k in job.schedule:
        weight = (1 + len(versions) - 1 - sent[k]) ** -exponent
        held.append(weight * _pseudo_gradient(job, k, versions[sent[k]], window))
        if len(held) == size:
            g = np.mean(held, axis=0)
            m = momentum * m + g
            versions.append(versions[-1] - server_rate * (g + momentum * m if nesterov else m))
            held = []
        sent[k] = len(versions) - 1
        yield versions[-1]


def fadas(
    job: Problem,
    window: int,
    buffer: int | None = None,
    server_rate: float = 1e-3,
    beta_1: float = 0.9,
    beta_2: float = 0.99,
    epsilon: float = 1e-8,
    delay_threshold: int | None = 1,
) -> Centers:
    versions, m, v, v_hat = [job.start], *(np.zeros_like(job.start) for _ in range(3))
    held, delays, sent, size = list[Vector](), list[int](), [0] * job.n, buffer or job.n
    for k in job.schedule:
        held.append(_window(job, k, versions[sent[k]], window))
        delays.append(len(versions) - 1 - sent[k])
        if len(held) == size:
            d, worst = np.mean(held, axis=0), max(delays)
            m = beta_1 * m + (1 - beta_1) * d
            v = beta_2 * v + (1 - beta_2) * d**2
            v_hat = np.maximum(v_hat, v)
            eta = server_rate if delay_threshold is None or worst <= delay_threshold else server_rate / worst
            versions.append(versions[-1] + eta * m / (np.sqrt(v_hat) + epsilon))
            held, delays = [], []
        sent[k] = len(versions) - 1
        yield versions[-1]


def ringmaster(job: Problem, window: int = 1, threshold: int | None = None, patience: int | None = 1) -> Centers:
    theta, sent, ite, limit, t = job.start, [job.start] * job.n, [0] * job.n, threshold or 2 * job.n, 0
    done, refused = [0] * job.n, [0] * job.n
    for k in job.schedule:
        end = sent[k]
        for batch in range(done[k], done[k] + window):
            end = end - job.eta(0) * job.numbered(k, end, batch)
        delta, tau = end - sent[k], t - ite[k]
        if tau >= limit and (patience is None or refused[k] < patience):
            sent[k], ite[k], refused[k] = theta, t, refused[k] + 1
            continue
        theta = theta + min(1.0, limit / max(tau, 1)) * delta
        t += 1
        sent[k], ite[k], refused[k], done[k] = theta, t, 0, done[k] + window
        yield theta
