"""Drawn pairs of jobs that differ in one setting: the second trains as if it were alone, to the bit.

The first job is repeated after the second, because workers of two jobs may alternate. ``--pairs N`` draws more.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from distkeras.data.batches import Batch
from distkeras.keras_model import archive
from distkeras.keras_model.recipe import Recipe, recipe_of
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.replica_cache import ReplicaCache

#: Pairs in all walks without `--pairs`: by default, and in the slow tests.
FEW, MANY = 4, 420
#: Wrappers: the base class, one that is drawn as an option, and one that no worker accepts.
WRAPPERS = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
OPTIMIZERS = [
    name
    for name, kind in vars(keras.optimizers).items()
    if inspect.isclass(kind) and issubclass(kind, keras.optimizers.Optimizer) and name not in WRAPPERS
]
schedules = keras.optimizers.schedules


def folded(*inner: Any) -> list[Any]:
    return [layers.Reshape((3, 2)), *inner, layers.Flatten()]


#: Layers with 6 inputs; several have state that is not in the center.
LAYERS: dict[str, Callable[[], list[Any]]] = {
    "plain": lambda: [layers.Dense(4, "relu")],
    "wider": lambda: [layers.Dense(5, "relu")],
    "other activation": lambda: [layers.Dense(4, "tanh")],
    "no bias": lambda: [layers.Dense(4, "relu", use_bias=False)],
    "statistics": lambda: [layers.Dense(4), layers.BatchNormalization()],
    "faster statistics": lambda: [layers.Dense(4), layers.BatchNormalization(momentum=0.5)],
    "frozen statistics": lambda: [layers.Dense(4), layers.BatchNormalization(trainable=False)],
    "dropout": lambda: [layers.Dense(8), layers.Dropout(0.5, seed=3)],
    "another seed": lambda: [layers.Dense(8), layers.Dropout(0.5, seed=4)],
    "noise": lambda: [layers.Dense(4), layers.GaussianNoise(0.5, seed=3), layers.AlphaDropout(0.3, seed=2)],
    "frozen": lambda: [layers.Dense(4, trainable=False)],
    "l2": lambda: [layers.Dense(4, kernel_regularizer="l2")],
    "l1": lambda: [layers.Dense(4, kernel_regularizer=keras.regularizers.L1(0.1))],
    "activity": lambda: [layers.Dense(4, activity_regularizer=keras.regularizers.L2(0.1))],
    "constrained": lambda: [layers.Dense(4, kernel_constraint=keras.constraints.MaxNorm(0.5))],
    "tighter": lambda: [layers.Dense(4, kernel_constraint=keras.constraints.MaxNorm(0.2))],
    "spectral": lambda: [layers.SpectralNormalization(layers.Dense(4))],
    "normalized": lambda: [layers.Dense(4), layers.LayerNormalization()],
    "convolution": lambda: folded(layers.Conv1D(3, 2)),
    "recurrent": lambda: folded(layers.SimpleRNN(3, dropout=0.3, seed=1, return_sequences=True)),
    "both ways": lambda: folded(layers.Bidirectional(layers.GRU(2, reset_after=False, seed=1), merge_mode="sum")),
    "within": lambda: [keras.Sequential([layers.Dense(4), layers.Dropout(0.2, seed=1)])],
}


def crossentropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy()


#: Losses, and their labels: class numbers, one-hot classes, or one number per row.
LOSSES: dict[str, tuple[Callable[[], Any], str]] = {
    "by name": (lambda: "sparse_categorical_crossentropy", "classes"),
    "object": (crossentropy, "classes"),
    "summed": (lambda: keras.losses.SparseCategoricalCrossentropy(reduction="sum"), "classes"),
    "squares": (lambda: "mse", "one-hot"),
    "squares of a number": (lambda: "mse", "number"),
    "smoothed": (lambda: keras.losses.CategoricalCrossentropy(label_smoothing=0.1), "one-hot"),
    "smoother": (lambda: keras.losses.CategoricalCrossentropy(label_smoothing=0.3), "one-hot"),
    "huber": (lambda: keras.losses.Huber(), "one-hot"),
}
METRICS: dict[str, Callable[[bool], Any]] = {
    "accuracy": lambda _: ["accuracy"],
    "none": lambda _: None,
    "several": lambda classes: [keras.metrics.SparseTopKCategoricalAccuracy(2) if classes else "mae", "accuracy"],
}
#: Names of layers: those of Keras, which are numbered, or given ones.
NAMES: dict[str, Callable[[int], str | None]] = {
    "numbered by Keras": lambda _: None,
    "once more": lambda _: None,
    "given": lambda place: f"block_{place}",
    "given with other numbers": lambda place: f"block_{place + 1}",
    "given with other words": lambda place: f"part_{place}",
}
RATES: dict[str, Callable[[], Any]] = {
    "fast": lambda: 0.05,
    "slow": lambda: 0.01,
    "decaying": lambda: schedules.ExponentialDecay(0.05, 2, 0.5),
    "falling": lambda: schedules.ExponentialDecay(0.05, 1, 0.3),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "clipnorm": {"clipnorm": 0.1},
    "tighter clipnorm": {"clipnorm": 0.01},
    "global clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.01},
    "decay": {"weight_decay": 0.1},
    "averaging": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "scaled": {"loss_scale_factor": 8.0},
}
#: Arguments that only some optimizers have.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "none": {},
    "momentum": {"momentum": 0.9},
    "beta": {"beta_1": 0.5},
    "rho": {"rho": 0.5},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "amsgrad": {"amsgrad": True},
    "centered": {"centered": True},
    "one layer excluded": {"exclude_layers": ["block_1"]},
    "warmup": {"warmup_steps": 3},
}
#: The settings of a job; a walk begins with the first value of each.
FACETS: dict[str, tuple[Any, ...]] = {
    "layers": tuple(LAYERS),
    "optimizer": tuple(OPTIMIZERS),
    "loss": tuple(LOSSES),
    "metrics": tuple(METRICS),
    "names": tuple(NAMES),
    "rate": tuple(RATES),
    "settings": tuple(SETTINGS),
    "arguments": tuple(ARGUMENTS),
    "wrapped": (False, True),
    "policy": ("float32", "mixed_bfloat16", "mixed_float16"),
    "weights": (0, 1, 2),
    "center": (0, 1, 2),
    "data": (0, 1, 2),
    "weighted": (False, True),
    "rows": (4, 7),
    "epsilon": (1e-7, 1e-3),
    "use": ("train", "gradient"),
}
#: Settings whose change keeps the replica: a defect there would raise no error.
SERVED = ("names", "rate", "weights", "center", "data")
Job = tuple[tuple[str, Any], ...]


def optimizer_of(job: Mapping[str, Any]) -> Any:
    kind = getattr(keras.optimizers, job["optimizer"])
    known = inspect.signature(kind).parameters
    arguments = ARGUMENTS[job["arguments"]]
    if not arguments.keys() <= known.keys():
        arguments = {}
    optimizer = kind(RATES[job["rate"]](), **SETTINGS[job["settings"]], **arguments)
    return keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=2) if job["wrapped"] else optimizer


def model_of(job: Mapping[str, Any]) -> keras.Model:
    keras.utils.set_random_seed(job["weights"])
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(job["policy"])
    try:
        parts = [*LAYERS[job["layers"]](), layers.Dense(3, "softmax", dtype="float32")]
        named = [(part, NAMES[job["names"]](place)) for place, part in enumerate(parts)]
        for part, name in named:
            if name is not None:
                part.name = name
        model = keras.Sequential([keras.Input((6,)), *parts])
        make_loss, labels = LOSSES[job["loss"]]
        model.compile(optimizer_of(job), make_loss(), metrics=METRICS[job["metrics"]](labels == "classes"))
    finally:
        keras.config.set_dtype_policy(before)
    return model


def batches_of(job: Mapping[str, Any], model: keras.Model) -> list[Batch]:
    draw, rows = np.random.default_rng(job["data"]), job["rows"]
    kind, found = LOSSES[job["loss"]][1], []
    for index in range(4):
        x, y = draw.normal(size=(rows, 6)).astype(np.float32), draw.integers(0, 3, rows).astype(np.int32)
        weight = draw.uniform(0.5, 2, rows).astype(np.float32) if job["weighted"] else None
        if kind != "classes":
            y = np.eye(3, dtype=np.float32)[y] if kind == "one-hot" else y[:, None].astype(np.float32)
        found.append(Batch(0, index, index == 3, (x,), (y,), weight))
    return found


def result(replica: KerasReplica, job: Mapping[str, Any]) -> list[np.ndarray]:
    """Train as a worker does, with a new center before each of the two windows, and return all results and state."""
    draw, batches = np.random.default_rng(job["center"]), batches_of(job, replica.model)
    statistics, found = replica.moving_statistics.empty(), []
    for window in (batches[:3], batches[3:]):
        replica.load(draw.normal(size=replica.size).astype(np.float32))
        replica.load_moving_statistics(draw.uniform(0.5, 1.5, statistics.size).astype(np.float32))
        out = np.empty(replica.size, np.float32)
        if job["use"] == "train":
            found.append(replica.train(window))
        else:
            for batch in window:
                found += [replica.gradient(batch, out), out.copy()]
        replica.read(out)
        replica.read_moving_statistics(statistics)
        found += [out.copy(), statistics.copy()]
    state = [*replica.model.variables]
    if job["use"] == "train":
        state += replica.model.optimizer.variables
    return found + [np.array(keras.ops.convert_to_numpy(variable)) for variable in state]


@functools.cache
def packed(job: Job) -> tuple[Recipe, bytes]:
    model = model_of(dict(job))
    file = archive.to_bytes(model)
    return recipe_of(model, file), file


def run(cache: ReplicaCache, job: Job) -> list[np.ndarray]:
    settings = dict(job)
    before = keras.config.epsilon()
    keras.config.set_epsilon(settings["epsilon"])
    try:
        with cache.lent(*packed(job)) as replica:
            return result(replica, settings)
    finally:
        keras.config.set_epsilon(before)


@functools.cache
def alone(job: Job) -> list[np.ndarray]:
    return run(ReplicaCache(), job)


def applicable(optimizer: str) -> list[str]:
    """Return the names of the arguments in `ARGUMENTS` that an optimizer accepts."""
    known = inspect.signature(getattr(keras.optimizers, optimizer)).parameters
    return [name for name, arguments in ARGUMENTS.items() if arguments.keys() <= known.keys()]


def walk(draw: random.Random, optimizer: str, pairs: int) -> list[Job]:
    """Draw jobs: one, another that differs in one setting, the first again; then continue from one of the two."""
    job = {facet: values[0] for facet, values in FACETS.items()} | {"optimizer": optimizer}
    job |= {"layers": draw.choice(FACETS["layers"]), "arguments": applicable(optimizer)[-1], "names": "given"}
    jobs = [tuple(job.items())]
    facets: list[str] = []
    while len(jobs) <= pairs:
        if not facets:
            facets = [*draw.sample(SERVED, len(SERVED)), *draw.sample(sorted(FACETS), 4)]
        facet = facets.pop(0)
        values = applicable(job["optimizer"]) if facet == "arguments" else FACETS[facet]
        other = job | {facet: draw.choice([value for value in values if value != job[facet]] or [job[facet]])}
        jobs += [tuple(other.items()), tuple(job.items())]
        if facet not in SERVED:
            job = other
    return jobs[: pairs + 1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Adafactor's smallest number underflows in float16
@pytest.mark.parametrize(
    ("optimizer", "pairs"),
    [
        ("AdamW", FEW),  # the other optimizers differ only in their states
        *(pytest.param(optimizer, MANY, marks=pytest.mark.slow) for optimizer in OPTIMIZERS),
    ],
)
def test_the_second_of_two_jobs_trains_as_if_it_were_alone(
    optimizer: str, pairs: int, pytestconfig: pytest.Config
) -> None:
    pairs = pytestconfig.getoption("pairs") or pairs
    draw = random.Random(optimizer)
    cache, before = ReplicaCache(), None
    alone.cache_clear()
    packed.cache_clear()
    compared, jobs = 0, walk(draw, optimizer, -(-pairs // len(OPTIMIZERS)))
    for job in jobs:
        try:
            wanted = alone(job)
        except Exception:  # noqa: BLE001 - Keras cannot train some jobs: Muon with clipped gradients of two dtypes
            continue
        for place, (found, expected) in enumerate(zip(run(cache, job), wanted, strict=True)):
            changed: dict[str, Any] = {} if before is None else dict(set(job) - set(before))
            np.testing.assert_array_equal(found, expected, err_msg=f"{changed=} at {place} of {job} after {before}")
        before, compared = job, compared + 1
    assert compared > 0.7 * len(jobs)
