"""A drawn job: one value of each facet, and the model, the compilation and the mini-batches that follow from them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import keras
import numpy as np

from distkeras.ps.rules import center_rules, make
from support.draws.layers import LAYERS, Place
from support.draws.models import (
    ARGUMENTS,
    FORMS,
    LAST,
    OPTIONS,
    ROWS,
    RULES,
    SETTINGS_OF_KERAS,
    STEPS,
    Built,
    Network,
    first_layer,
    rows_of,
)
from support.draws.parts import LABELS, LOSSES, METRICS, OPTIMIZERS, RATES, SETTINGS, Labels


@dataclass(frozen=True)
class Job:
    """One value of each facet, by name; ``rule`` is a number in `RULES`.

    Args:
        given: the trainer receives optimizer, loss and metrics, and the model is not compiled.
    """

    layer: str = "Dense"
    form: str = "functional"
    argument: str = "none"
    optimizer: str = "SGD"
    rate: str = "number"
    setting: str = "none"
    loss: str = "MeanSquaredError"
    metrics: tuple[str, ...] = ()
    option: str = "none"
    keras: str = "defaults"
    rule: int = 0
    weighted: bool = False
    given: bool = False
    seed: int = 0

    def __str__(self) -> str:
        rule, hyper = RULES[self.rule]
        parts = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.default != getattr(self, field.name)
        ]
        return f"Job({', '.join(parts)})  # {rule} {hyper}"


class MiniBatch(NamedTuple):
    """The rows of one step: an array for each input and each output, and the weights."""

    x: tuple[np.ndarray, ...]
    y: tuple[np.ndarray, ...]
    weight: np.ndarray | None


class Prepared(NamedTuple):
    """A user's program: the model, what `compile` receives, the mini-batches."""

    built: Built
    arguments: dict[str, Any]
    batches: list[MiniBatch]


#: Learning rates that are numbers.
NUMBERS = ("number", "small")
#: Rules that need a plain step of SGD.
PLAIN = [
    number
    for number, (name, hyper) in enumerate(RULES)
    for traits in [make(name, **hyper).traits]
    if traits.gradient or traits.plain_sgd
]


def is_half(argument: str, settings: str) -> bool:
    """Return whether a part of a model computes in half precision."""
    return "16" in argument or "16" in settings


@contextmanager
def configured(settings: Mapping[str, Any]) -> Iterator[None]:
    """Set ``keras.config`` for the duration of the context."""
    before = {name: getattr(keras.config, name)() for name in settings}
    for name, value in settings.items():
        getattr(keras.config, f"set_{name}")(value)
    try:
        yield
    finally:
        for name, value in before.items():
            getattr(keras.config, f"set_{name}")(value)


def change(job: Job, built: Built, batches: Sequence[MiniBatch]) -> None:
    """Do what a user does to a model once it is compiled."""
    model = built.model
    if job.form in ("trained before", "frozen once trained") and not job.given:
        for batch in batches[:2]:
            model.train_on_batch(*as_keras(built, batch))
    if job.form == "changed rate" and not job.given and job.rate in NUMBERS:
        model.optimizer.learning_rate = 0.02
    if job.form == "counted steps" and not job.given:
        model.optimizer.iterations.assign(3)
    if job.form in ("frozen once compiled", "frozen once trained"):
        model.get_layer("first").trainable = False
        model.train_function = None  # Keras traces its step once


def labels_of(job: Job) -> Labels:
    return LABELS[LOSSES[job.loss].labels[0]]


def prepared(job: Job) -> Prepared:
    """Return the user's program of a job, whose settings of ``keras.config`` are set."""
    keras.utils.set_random_seed(job.seed)
    place, inner = LAYERS[job.layer]
    first = first_layer(job.argument)
    labels = labels_of(job)
    built = FORMS[job.form](Network(place, lambda x: first(inner(x)), labels.activation, labels.units))
    arguments = arguments_of(job, built)
    batches = batches_of(job, built)
    if job.setting == "excluded":
        arguments["optimizer"].exclude_from_weight_decay(var_names=["bias"])
    if not job.given:
        built.model.compile(**arguments)
    change(job, built, batches)
    return Prepared(built, arguments, batches)


def arguments_of(job: Job, built: Built) -> dict[str, Any]:
    outputs, options = built.outputs, OPTIONS[job.option]
    loss, metrics = LOSSES[job.loss].make, [METRICS[name].make for name in job.metrics]
    found: dict[str, Any] = {"optimizer": OPTIMIZERS[job.optimizer](RATES[job.rate](), **SETTINGS[job.setting])}
    if not outputs:
        found |= {"loss": loss(), "metrics": [metric() for metric in metrics]}
        if job.option == "named" and job.form == "functional":
            found = {**found, "loss": {"head": found["loss"]}, "metrics": {"head": found["metrics"]}}
        if job.option == "listed":
            found = {**found, "loss": [found["loss"]], "metrics": [found["metrics"]]}
    elif built.keyed:
        found |= {"loss": {name: loss() for name in outputs}}
        found |= {"metrics": {name: [metric() for metric in metrics] for name in outputs}}
    else:
        found |= {"loss": [loss() for _ in outputs], "metrics": [[metric() for metric in metrics] for _ in outputs]}
    if "loss_weights" in options:
        weight = options["loss_weights"]
        several = {name: weight for name in outputs} if built.keyed else [weight for _ in outputs]
        options = {"loss_weights": several if outputs else weight}
    if "weighted_metrics" in options:
        found["weighted_metrics"] = found.pop("metrics")
        options = {}
    if job.given and not options.keys() <= {"loss_weights", "weighted_metrics"}:
        options = {}  # a trainer does not take it
    return found | options


def batches_of(job: Job, built: Built) -> list[MiniBatch]:
    draw = np.random.default_rng(job.seed)
    labels = labels_of(job)
    found = []
    for step in range(STEPS):
        rows = ROWS if step < STEPS - 1 or built.whole else LAST
        x = tuple(rows_of(place, draw, rows).astype(place.dtype) for place in built.places)
        y = tuple(as_labels(drawn_labels(labels, draw, rows, built.steps)) for _ in built.outputs or (None,))
        found.append(MiniBatch(x, y, draw.uniform(0.5, 2, rows).astype(np.float32) if job.weighted else None))
    return found


def drawn_labels(labels: Labels, draw: np.random.Generator, rows: int, steps: int | None) -> np.ndarray:
    """Return labels of rows, or of each step of rows."""
    values = labels.draw(draw, rows * (steps or 1))
    return values if steps is None else values.reshape(rows, steps, *values.shape[1:])


def as_labels(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int32 if values.dtype.kind == "i" else np.float32)


def as_keras(built: Built, batch: MiniBatch) -> tuple[Any, ...]:
    """Return a mini-batch as `train_on_batch` takes it: x, y and, if there are any, weights."""
    x: Any = dict(zip(built.inputs, batch.x, strict=True)) if built.inputs else list(batch.x)
    if built.nested:
        x = [x[0], x[1:]]
    y: Any = dict(zip(built.outputs, batch.y, strict=True)) if built.keyed else list(batch.y)
    x, y = (side[0] if isinstance(side, list) and len(side) == 1 else side for side in (x, y))
    return (x, y) if batch.weight is None else (x, y, batch.weight)


def drawn(seed: int) -> Job:
    """Return job number ``seed``. The values of a facet follow one another in an order of its own; none is rare."""

    def turn(facet: str, values: Sequence[Any], usual: Any = None, share: float = 0.0) -> Any:
        """Return the value of a facet, which is the ``usual`` one for a share of the jobs."""
        if share and random.Random(f"{facet} {seed}").random() < share:
            return usual
        order = random.Random(f"{facet} {seed // len(values)}").sample(list(values), len(values))
        return order[seed % len(values)]

    rule = turn("rule", range(len(RULES)))
    loss = turn("loss", list(LOSSES))
    labels = LOSSES[loss].labels[0]
    fitting = [name for name, kind in METRICS.items() if labels in kind.labels]
    metrics = tuple(random.Random(f"metrics {seed}").sample(fitting, min(len(fitting), seed % 4)))
    optimizers = ["SGD", "LossScaleOptimizer"] if rule in PLAIN else list(OPTIMIZERS)
    argument = turn("argument", list(ARGUMENTS), "none", 0.3)
    settings = turn("keras", list(SETTINGS_OF_KERAS), "defaults", 0.7)
    if is_half(argument, settings) and rule not in PLAIN:
        rule = seed % 2  # a rule with a formula would round elsewhere than Keras
    return Job(
        layer=turn("layer", list(LAYERS)),
        form=turn("form", list(FORMS), "functional", 0.3),
        argument=argument,
        optimizer=turn("optimizer", optimizers),
        rate=turn("rate", list(RATES), "number", 0.3),
        setting=turn("setting", list(SETTINGS), "none", 0.6),
        loss=loss,
        metrics=metrics,
        option=turn("option", list(OPTIONS), "none", 0.4),
        keras=settings,
        rule=rule,
        weighted=seed % 3 == 0,
        given=seed % 4 == 1,
        seed=seed,
    )


def all_rules() -> set[str]:
    return {*center_rules(), "daso"}


def place_names(places: Sequence[Place]) -> list[str]:
    return [f"x{number}" for number in range(len(places))]
