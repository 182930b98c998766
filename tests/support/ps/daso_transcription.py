"""DASO as in its paper, in plain numpy and for each device: the reference for `daso_simulator`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

Vector = np.ndarray


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Return the upper half of each float32, rounded to the nearest, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def daso(
    start: Vector,
    gradient: Callable[[Vector, int], Vector],
    P: int,
    G: int,
    eta: Callable[[int], float],
    gamma: float,
    plan: Sequence[tuple[int, int] | None],
    cast: bool,
) -> Iterator[np.ndarray]:
    """Yield the parameters of all devices after each mini-batch, shape ``(P, G, size)``.

    Args:
        plan: B and W for each mini-batch; None if its synchronization is blocking.
    """
    x = np.array([[start] * G] * P)
    v = np.zeros_like(x)
    group, last, flight = 0, -1, None
    for t, now in enumerate(plan):
        g = np.array([[gradient(x[p, j], p * G + j) for j in range(G)] for p in range(P)])
        v = gamma * v + g.mean(axis=1, keepdims=True)
        x = x - eta(t) * v
        if P > 1 and now is None:
            mean = np.mean([bfloat16(x[p, group]) if cast else x[p, group] for p in range(P)], axis=0)
            x[:, group] = mean
        elif now is not None and P > 1:
            B, W = now
            if flight and t == flight[0] + flight[1]:
                _, S, j, states = flight
                x[:, j] = (2 * S * x[:, j] + sum(states)) / (2 * S + P)
                x[:] = x[:, [j]]
                flight = None
            if flight is None and t - last >= B:
                flight = (t, W, group, [x[p, group].copy() for p in range(P)])
                group, last = (group + 1) % G, t
        if now is None:
            x[:] = x[:, [group]]
            group, last, flight = (group + 1) % G, t, None
        yield x.copy()
