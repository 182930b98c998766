"""What callbacks of Keras change in the driver's copy: it reaches the workers, or is an error at the first change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from support.patience import PATIENT
from support.ps.running_server import Running
from support.training.small_classifier import mini, weights

from distkeras import KerasCallbacks
from distkeras.callbacks import CallbackContext, CenterWeights, JobLink, TrainingSetup
from distkeras.data.batches import Batch
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.settable import settable
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.driver_messages import Status
from distkeras.ps.protocol.loop import Loop
from distkeras.ps.protocol.messages import Welcome
from distkeras.ps.rules import Rule, make
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import run_worker, work

BETA = keras.Variable(1.0, trainable=False, name="beta")


def annealed(y_true: Any, y_pred: Any) -> Any:
    return BETA * keras.ops.mean(keras.ops.square(y_true - y_pred))


class Scaled(layers.Layer):
    """Multiplies by a number that is not trained, and has a setting that a step reads once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.power = 1.0

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(), initializer="ones", trainable=False, name="factor")

    def call(self, x: Any) -> Any:
        return x * self.factor**self.power


def made(rate: Any = 0.5, loss: Any = "mse") -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="first"), Scaled(name="scaled")])
    model.compile(keras.optimizers.SGD(rate, momentum=0.5), loss)
    return model


def mini_batches(count: int) -> list[Batch]:
    draw = np.random.default_rng(1)
    arrays = [draw.normal(size=(4, 2)).astype("float32") for _ in range(2 * count)]
    made = zip(arrays[::2], arrays[1::2], strict=True)
    return [Batch(0, number, number == count - 1, (x,), (y,), None) for number, (x, y) in enumerate(made)]


class Job:
    """A server, the driver's copy, and at most one worker, whose exchanges the test sees."""

    def __init__(self, callbacks: list[Any], rule: Rule, build: Callable[[], keras.Model], **options: Any) -> None:
        self.rule, self.build = rule, build
        self.callback = KerasCallbacks(callbacks, every_commits=options.pop("every_commits", 1))
        outcome: Any = SimpleNamespace(resumed=True if options.pop("resumed", False) else None)
        self.replica = KerasReplica(build())
        self.running = Running(
            rule,
            workers=1,
            start=weights(self.replica),
            size=self.replica.size,
            moving_statistics=np.ones(self.replica.moving_statistics.size, np.float32),
            **options,
        )
        self.stopped: str | None = None
        self.events: list[str] = []
        setup = TrainingSetup(("loss",), lambda: self.replica, lambda df, most: mini((), ()), outcome=outcome)
        setup.events.report = lambda log, kind, text, *args, **_: self.events.append(text % args)
        self.callback.on_begin(setup)

    def context(self, *, loss: float = 0.5, final: bool = False) -> CallbackContext:
        driver = self.running.driver
        status = Status(driver.center().clock, 1, 0, 0, 0, loss, math.nan)
        link = JobLink(lambda call: call(driver), [])
        fetch = lambda: CenterWeights.fetch(driver)  # noqa: E731 - a name makes no shorter test
        return CallbackContext(
            status, 1.0, fetch, lambda: self.replica, lambda why: setattr(self, "stopped", why), final=final, link=link
        )

    def values(self) -> dict[int, float]:
        return {int(place): value for place, value in self.running.driver.center().values}

    def train(self, batches: list[Batch], after_exchange: Callable[[], None]) -> KerasReplica:
        """Train as a worker does, and return its model."""
        replica = KerasReplica(self.build())
        client = WorkerClient(
            self.running.address,
            worker=0,
            attempt=0,
            size=replica.size,
            moving_statistics=replica.moving_statistics.size,
            deadlines=PATIENT,
        )

        def begin(welcome: Welcome) -> Loop:
            steps = work(
                self.rule,
                replica,
                iter(batches),
                lambda: client.payload(self.rule.traits.parts),
                moving_statistics=replica.moving_statistics.size,
            )
            reply = None
            while True:
                try:
                    request = steps.send(reply)
                except StopIteration:
                    return
                reply = yield request
                if reply is not None and reply.center is not None:
                    after_exchange()

        run_worker(client, client.join(), begin)
        client.close()
        return replica


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def new(*callbacks: Any, rule: Rule | None = None, build: Any = made, **options: Any) -> Job:
        jobs.append(Job(list(callbacks), rule or make("downpour", window=1), build, **options))
        return jobs[-1]

    yield new
    for each in jobs:
        each.running.__exit__()


def by_keras(build: Callable[[], keras.Model], batches: list[Batch], change: Callable[[keras.Model, int], None]) -> Any:
    """Return the weights after plain steps, each after ``change(model, step)``."""
    model = build()
    for step, batch in enumerate(batches):
        change(model, step)
        model.train_on_batch(batch.x[0], batch.y[0])
    return model.get_weights()


class Halving(keras.callbacks.Callback):
    """Halves the learning rate at the end of each epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        optimizer.learning_rate = float(optimizer.learning_rate) / 2


def test_a_schedule_sets_the_rate_of_each_epoch_before_its_steps(job: Callable[..., Job]) -> None:
    """One worker exchanges after each step. A rate that is set after the reply to a commit counts a step later."""
    seen: list[tuple[int, float]] = []

    def schedule(epoch: int, rate: float) -> float:
        seen.append((epoch, rate))
        return 0.4 / (epoch + 1)

    running = job(keras.callbacks.LearningRateScheduler(schedule))
    assert running.callback.acts_at_start
    running.callback.on_start(running.context())
    batches = mini_batches(6)
    replica = running.train(batches, lambda: running.callback.on_center(running.context()))
    # The first exchange is the worker's pull, before which nothing was committed.
    rates = [0.4 / (1 + max(0, step - 1)) for step in range(6)]
    expected = by_keras(made, batches, lambda model, step: setattr(model.optimizer, "learning_rate", rates[step]))
    for mine, theirs in zip(replica.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)
    assert seen[0] == (0, 0.5)
    assert [epoch for epoch, _ in seen] == list(range(7))
    assert seen[3][1] == pytest.approx(0.4 / 3)
    assert "LearningRateScheduler.on_epoch_begin has set the learning rate (0.2) from commit 1 on" in running.events[1]


def test_a_plateau_lowers_the_rate(job: Callable[..., Job]) -> None:
    running = job(keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.0))
    batches, rates = mini_batches(4), list[float]()

    def passed() -> None:
        running.callback.on_center(running.context(loss=1.0))
        rates.append(running.values().get(0, 0.5))

    running.train(batches, passed)
    assert rates == [0.5, 0.5, 0.25, 0.125, 0.0625]


@pytest.mark.parametrize(
    "name", ["asgd", pytest.param("ssgd", marks=pytest.mark.slow), pytest.param("multi_asgd", marks=pytest.mark.slow)]
)
def test_a_gradient_rule_steps_at_the_server_with_the_rate(job: Callable[..., Job], name: str) -> None:
    running = job(Halving(), rule=make(name), build=lambda: made(rate=9.0), eta=0.5)
    batches = mini_batches(4)
    rates: list[float] = []

    def passed() -> None:
        running.callback.on_center(running.context())
        rates.append(running.running.driver.center().learning_rate)

    running.train(batches, passed)
    assert rates == [0.5, 0.25, 0.125, 0.0625, 0.03125]
    assert float(running.replica.model.optimizer.learning_rate) == 0.03125


class Annealing(keras.callbacks.Callback):
    """Sets a variable of a layer, and one that the loss uses."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.layers[-1].factor.assign(1.0 + epoch)
        BETA.assign(0.5 / (1 + epoch))


@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX compiles a variable of a loss into the step")
def test_variables_that_are_annealed_reach_the_workers(job: Callable[..., Job]) -> None:
    build = lambda: made(loss=annealed)  # noqa: E731 - a name makes no shorter test
    running = job(Annealing(), build=build)
    running.callback.on_start(running.context())
    batches = mini_batches(4)

    def change(model: keras.Model, step: int) -> None:
        model.layers[-1].factor.assign(1.0 + max(0, step - 1))
        BETA.assign(0.5 / (1 + max(0, step - 1)))

    try:
        replica = running.train(batches, lambda: running.callback.on_center(running.context()))
        names = {each.start: each.name for each in settable(replica.model)}
        assert [names[place].rsplit("/")[-1] for place in running.values()] == ["factor'", "variable 'loss.BETA'"]
        center = CenterWeights.fetch(running.running.driver)
        result = KerasReplica(build())
        center.load(result)
        assert float(result.model.layers[-1].factor) == 5.0
    finally:
        BETA.assign(1.0)
    expected = by_keras(build, batches, change)
    BETA.assign(1.0)
    for mine, theirs in zip(replica.model.get_weights()[:2], expected[:2], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)


def calling(hook: str, change: Callable[[keras.Model], None]) -> Any:
    callback = keras.callbacks.LambdaCallback()
    setattr(callback, hook, lambda *_: change(callback.model))
    return callback


def freeze(model: keras.Model) -> None:
    model.layers[0].trainable = False


def add_one(model: keras.Model) -> None:
    model.set_weights([weight + 1 for weight in model.get_weights()])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (freeze, r"LambdaCallback.on_epoch_end has changed `trainable` of layer 'first' \(2\) to False"),
        (add_one, "weights during training, first 'sequential.*/first/kernel'; it may do so in `on_train_end`"),
        pytest.param(
            lambda model: setattr(model.optimizer, "momentum", 0.1),
            "`optimizer.momentum` from 0.5 to 0.1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda model: setattr(model.layers[-1], "power", 2.0),
            r"`scaled \(\d\).power` from 1.0 to 2.0",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda model: model.compile("sgd", "mse"), "how the model is compiled", marks=pytest.mark.slow),
        (lambda model: setattr(model.optimizer, "learning_rate", np.nan), "the learning rate to a value .* not finite"),
    ],
)
def test_any_other_change_is_an_error_at_the_first(
    job: Callable[..., Job], change: Callable[[keras.Model], None], text: str
) -> None:
    running = job(calling("on_epoch_end", change), every_commits=1)
    running.callback.on_start(running.context())
    with pytest.raises(ConfigurationError, match=text):
        running.train(mini_batches(2), lambda: running.callback.on_center(running.context()))


def test_a_schedule_of_keras_cannot_be_set(job: Callable[..., Job]) -> None:
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    running = job(keras.callbacks.LearningRateScheduler(lambda epoch: 0.1), build=lambda: made(rate=rate))
    with pytest.raises(TypeError, match="learning rate is not settable"):
        running.callback.on_start(running.context())


def test_a_callback_that_changes_nothing_sends_nothing(job: Callable[..., Job], tmp_path: Path) -> None:
    def look(model: keras.Model) -> None:
        batch = mini_batches(1)[0]
        model.predict(batch.x[0], verbose=0)
        model.evaluate(batch.x[0], batch.y[0], verbose=0)
        model.save(tmp_path / "model.keras")
        keras.models.clone_model(model)

    running = job(keras.callbacks.EarlyStopping("loss", patience=9), calling("on_epoch_end", look))
    assert not running.callback.acts_at_start
    running.train(mini_batches(2), lambda: running.callback.on_center(running.context()))
    running.callback.on_end(running.context(final=True))
    assert running.values() == {}


def test_values_stay_when_a_state_or_statistics_are_loaded_and_end_with_the_job() -> None:
    batch = mini_batches(1)[0]
    replica = KerasReplica(made())
    replica.train([batch])
    state = replica.read_optimizer()
    replica.set_values(np.array([[0.0, 0.125], [1.0, 3.0]]))
    replica.load_moving_statistics(np.ones(1, np.float32))
    assert replica.load_optimizer(state, batch) == ""
    assert (replica.learning_rate, float(replica.model.layers[-1].factor)) == (0.125, 3.0)
    assert replica.begin_again(made())
    assert replica.learning_rate == 0.5
    replica.set_values(np.array([[0.0, 0.25]]))
    replica.load_moving_statistics(np.ones(1, np.float32))
    replica.train([batch])
    assert (replica.learning_rate, float(replica.model.layers[-1].factor)) == (0.25, 1.0)


def test_a_resumed_job_continues_with_its_epoch_and_its_rate(job: Callable[..., Job]) -> None:
    seen: list[tuple[int, float]] = []

    def schedule(epoch: int, rate: float) -> float:
        seen.append((epoch, rate))
        return rate

    running = job(keras.callbacks.LearningRateScheduler(schedule), every_commits=2, resumed=True)
    running.running.driver.set_values(np.array([[0.0, 0.125]]), 1)
    running.train(mini_batches(5), lambda: None)
    running.callback.on_start(running.context())
    assert seen == [(2, 0.125)]
