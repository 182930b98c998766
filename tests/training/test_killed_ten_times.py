"""Adam with a worker that is killed ten times: the final loss, with a server, a client and a model.

`pytest -m slow -s` prints the figures.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import pytest
from keras import layers
from support.ps.running_server import Running
from support.training.small_classifier import mini

from distkeras.data.batches import Batch
from distkeras.keras_model import archive
from distkeras.keras_model.recipe import Recipe, recipe_of
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.replica_cache import ReplicaCache
from distkeras.ps.protocol.loop import Loop
from distkeras.ps.protocol.messages import Welcome
from distkeras.ps.rules import make
from distkeras.ps.worker.loop import run_worker, work
from distkeras.ps.worker.optimizer_keeper import OptimizerKeeper, SaveInterval

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, KILLS, WINDOW, SEEDS = 660, 10, 5, 6
#: Simulated seconds of a step: a state is sent each second, which is every ten steps.
STEP_SECONDS = 0.1


class Killed(Exception):
    """The worker's process has ended."""


def data(seed: int) -> list[Batch]:
    """Return mini-batches with noisy labels, which a classifier does not memorize."""
    draw = np.random.default_rng(seed)
    teacher = draw.normal(size=(10, 4))
    batches = []
    for _ in range(STEPS):
        x = draw.normal(size=(32, 10)).astype(np.float32)
        y = (x @ teacher + draw.gumbel(size=(32, 4))).argmax(axis=1)
        batches.append(mini((x,), (y,)))
    return batches


def packed(seed: int) -> tuple[Recipe, bytes, np.ndarray]:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((10,)), layers.Dense(32, activation="relu"), layers.Dense(4, activation="softmax")]
    )
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    file = archive.to_bytes(model)
    replica = KerasReplica(model)
    start = replica.layout.empty()
    replica.read(start)
    return recipe_of(model, file), file, start


def train(seed: int, batches: Sequence[Batch], kills: Sequence[int], *, keep: bool) -> float:
    """Return the loss on held-out rows after a job whose worker is killed before the steps ``kills``."""
    recipe, file, start = packed(seed)
    cache, steps = ReplicaCache(), [0]
    rule = make("downpour", window=WINDOW)
    with Running(rule, workers=1, size=start.size, start=start) as running:
        for attempt, end in enumerate([*kills, STEPS + 1]):
            client = running.client(attempt=attempt, size=start.size)
            interval = SaveInterval(now=lambda: steps[0] * STEP_SECONDS)

            def following(welcome: Welcome, end: int = end) -> Iterator[Batch]:
                for index in range(welcome.batch, STEPS):
                    steps[0] += 1
                    if index == end:
                        raise Killed
                    batch = batches[index]
                    yield Batch(0, index, index == STEPS - 1, batch.x, batch.y, None)

            with cache.lent(recipe, file) as replica:

                def begin(welcome: Welcome) -> Loop:
                    parts = rule.traits.parts
                    keeper = None
                    if keep:
                        keeper = OptimizerKeeper(rule, replica, interval, welcome)  # noqa: B023 - called at once
                    payload = lambda: client.payload(parts)  # noqa: B023, E731 - called at once
                    return work(rule, replica, following(welcome), payload, keeper=keeper)

                with contextlib.suppress(Killed):
                    run_worker(client, client.join(), begin)
                client.close()
        center = running.driver.center().center
        with cache.lent(recipe, file) as replica:
            replica.load(center)
            return replica.evaluate(held_out(seed))["loss"]


def held_out(seed: int) -> Batch:
    """Return other rows of the same teacher."""
    draw = np.random.default_rng(seed)
    teacher = draw.normal(size=(10, 4))
    draw = np.random.default_rng(10_000 + seed)
    x = draw.normal(size=(4000, 10)).astype(np.float32)
    return mini((x,), ((x @ teacher + draw.gumbel(size=(4000, 4))).argmax(axis=1),))


def show(text: str) -> None:
    """Show a figure with ``pytest -s``."""
    sys.stdout.write(f"{text}\n")


def test_the_loss_is_that_of_an_undisturbed_job() -> None:
    rows = []
    for seed in range(SEEDS):
        batches = data(seed)
        kills = sorted(np.random.default_rng(seed).choice(np.arange(20, STEPS), KILLS, replace=False).tolist())
        undisturbed = train(seed, batches, [], keep=True)
        kept, lost = (train(seed, batches, kills, keep=keep) for keep in (True, False))
        rows.append((undisturbed, kept, lost))
        show(f"seed {seed}: undisturbed {undisturbed:.4f}, kept {kept:.4f}, lost {lost:.4f}")
    losses = np.array(rows)
    off = losses[:, 1:] - losses[:, :1]
    spread = losses[:, 0].std(ddof=1)
    show(f"mean difference: kept {off[:, 0].mean():+.4f}, lost {off[:, 1].mean():+.4f}")
    show(f"spread of a difference over seeds: kept {off[:, 0].std(ddof=1):.4f}, lost {off[:, 1].std(ddof=1):.4f}")
    show(f"spread of undisturbed jobs over seeds: {spread:.4f}")
    assert abs(off[:, 0].mean()) <= spread / 10
    assert np.abs(off[:, 0]).mean() < np.abs(off[:, 1]).mean() / 2
