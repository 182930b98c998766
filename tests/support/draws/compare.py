"""One drawn job, trained by a worker and a server and in plain Keras."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from distkeras.ps.errors import DistkerasError, NonFiniteError
from distkeras.ps.rules import make
from support.draws.jobs import Job, as_keras, configured, is_half, prepared
from support.draws.models import ROWS, RULES, SETTINGS_OF_KERAS
from support.draws.plain import Expected, assign, expected, vector
from support.draws.refusals import REFUSALS, is_refused, refusal_of
from support.draws.worker import Result, plan_of, table_of, trained, trainer_of


def difference(found: Result, wanted: Expected) -> dict[str, float]:
    """Return the largest differences of a job, relative to values above 1."""
    pairs = {"weights": (found.center, wanted.center), "statistics": (found.statistics, wanted.statistics)}
    pairs |= {name: (found.history[name], values) for name, values in wanted.history.items()}
    return {name: distance(*pair) for name, pair in pairs.items()}


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    if not found.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        apart = np.abs(found - wanted) / max(1.0, float(np.max(np.abs(wanted))))
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    return float(np.max(np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))))


def keras_error(job: Job) -> str:
    """Return the error of plain Keras in a step of a job; "" if it takes one."""
    try:
        with configured(SETTINGS_OF_KERAS[job.keras]):
            program = prepared(job)
            if job.given:
                program.built.model.compile(**program.arguments)
            step = as_keras(program.built, program.batches[0])
            program.built.model.fit(*step[:2], sample_weight=step[2] if step[2:] else None, batch_size=ROWS, verbose=0)
    except Exception as error:  # noqa: BLE001 - Keras raises errors of any class
        return f"{type(error).__name__}: {error}"
    return ""


#: Half of a unit in the last place of bfloat16 and float16, in which a center and plain Keras may round differently.
_HALF = 2.0**-8


#: A loss has diverged if it grows by this factor.
_DIVERGED = 100
#: Rounding of float32 that is enlarged: a gradient read off a step, a division by a root, a formula's own momentum.
_ENLARGED = 3e-5


def tolerance(job: Job) -> float:
    """Return the largest difference that is rounding: of float32, or of half precision, more under a rule's formula."""
    name, _ = RULES[job.rule]
    if is_half(job.argument, job.keras):  # TensorFlow rounds in other places in the graph of a window than of a step
        return (2 if name == "downpour" else 8) * _HALF
    return 1e-6 if name == "downpour" and job.optimizer in ("SGD", "SGD with momentum") else _ENLARGED


def limit_of(name: str, job: Job) -> float:
    """Return the largest difference of one result that is rounding."""
    limit = tolerance(job)
    if name == "outputs":  # sums over weights of two centers, each of which may differ by the limit
        return 2 * max(limit, _ENLARGED)
    return limit


def compare(job: Job) -> dict[str, float]:
    """Train a job with one worker and in plain Keras, and return the largest difference of each result.

    Raises:
        DistkerasError: the job is refused, or a worker has failed.
    """
    name, hyper = RULES[job.rule]
    rule = make(name, **hyper)
    with configured(SETTINGS_OF_KERAS[job.keras]):
        program = prepared(job)
        model = program.built.model
        before = variables_of(model, compiled=not job.given)
        trainer = trainer_of(program, rule, given=job.given)
        table = table_of(program.batches)
        plan = plan_of(trainer, table)
        assert np.array_equal(before, variables_of(model, compiled=not job.given), equal_nan=True)
        with as_another_process():
            found = trained(plan, table)
        if job.given:
            model.compile(**program.arguments)
        wanted = expected(program, rule, hyper)
        assert {*found.history} == {*wanted.history}
        if is_half(job.argument, job.keras) and np.max(wanted.history["loss"]) > _DIVERGED * wanted.history["loss"][0]:
            return {}  # rounding has grown with the weights
        x, *_ = as_keras(program.built, program.batches[0])
        assign(model.trainable_variables, wanted.center)
        outputs = [keras.tree.flatten(part(x, training=False)) for part in (found.model, model)]
        predicted, right = (
            np.concatenate([np.ravel(keras.ops.convert_to_numpy(value)) for value in side], dtype=np.float64)
            for side in outputs
        )
        return difference(found, wanted) | {"outputs": distance(predicted, right)}


@contextmanager
def as_another_process() -> Iterator[None]:
    """Take away what a worker's process does not have: the settings of Keras, and the classes that were registered."""
    registered = keras.saving.get_custom_objects()
    before = dict(registered)
    for name in [name for name in registered if not name.startswith("distkeras")]:
        del registered[name]
    defaults = {"dtype_policy": "float32", "floatx": "float32", "epsilon": 1e-7}
    try:
        with configured(defaults):
            yield
    finally:
        registered.update(before)


def variables_of(model: Any, *, compiled: bool) -> np.ndarray:
    return vector([*model.variables, *(model.optimizer.variables if compiled else ())])


def ends_finite(job: Job) -> bool:
    """Return whether the job ends with finite numbers in plain Keras."""
    name, hyper = RULES[job.rule]
    with configured(SETTINGS_OF_KERAS[job.keras]):
        program = prepared(job)
        if job.given:
            program.built.model.compile(**program.arguments)
        return bool(np.isfinite(expected(program, make(name, **hyper), hyper).center).all())


def outcome(job: Job) -> str:
    """Return "" if the results of a job are equal, "refused as expected", or else what is wrong."""
    try:
        apart = compare(job)
    except NonFiniteError as error:
        return f"NonFiniteError: {error}" if ends_finite(job) else "refused as expected"
    except DistkerasError as error:
        return "refused as expected" if refusal_of(job, str(error)) else f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - the error of a job belongs to its report
        return "".join(traceback.format_exception(error)[-3:])
    if is_refused(job):
        return "it must be refused: " + ", ".join(refusal.text for refusal in REFUSALS if refusal.applies(job))
    wrong = {name: value for name, value in apart.items() if value > limit_of(name, job)}
    return f"different: {wrong}" if wrong else ""
