"""Every kind of model: one worker and a server train it as Keras itself does, or it is refused with the reason.

A job is drawn from tables of layers, forms of models, optimizers, losses, metrics, options and rules. Its rows pass
through the trainer's checks, the task that runs on an executor, and a real server. Keras trains the user's own model
object on the same mini-batches, and the rule's formula moves the center. A comparison with what exists in Keras finds
what is not drawn. ``--pairs N`` draws more jobs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from support.draws import models, parts
from support.draws.compare import keras_error, outcome
from support.draws.jobs import Job, all_rules, configured, drawn, prepared
from support.draws.layers import LAYERS, REASONS
from support.draws.refusals import is_refused

from distkeras import private_keras
from distkeras.keras_model import archive
from distkeras.keras_model.recipe import recipe_of
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.variables import numpy_value
from distkeras.ps.errors import ConfigurationError

#: Jobs in all parts without `--pairs`: by default, and in the slow tests.
FEW, MANY = 2, 400
PARTS = 4
#: Models that are loaded in two ways by default.
LOADED = 6
#: Those that XLA compiles.
IN_XLA = 24
#: Outcomes of a job that are right.
EXPECTED = ("", "refused as expected")


def names_in(module: Any) -> set[str]:
    """Return the public names of a module of Keras, without other names of the same classes."""
    found = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name for name, value in found.items() if not inspect.isclass(value) or value.__name__ == name}


def arguments_of(function: Callable[..., Any]) -> set[str]:
    named = inspect.signature(function).parameters.values()
    return {part.name for part in named if part.kind not in (part.VAR_KEYWORD, part.VAR_POSITIONAL)} - {"self"}


def classes_in(module: Any) -> set[str]:
    return {name for name in names_in(module) if inspect.isclass(getattr(module, name))}


def settings_in(module: Any) -> set[str]:
    return {name.removeprefix("set_") for name in vars(module) if name.startswith("set_")}


#: What exists in Keras, what is drawn of it, and the reasons for the rest.
TABLES: dict[str, tuple[set[str], Collection[str], Mapping[str, str]]] = {
    "layers": (classes_in(keras.layers), LAYERS, REASONS),
    "losses": (names_in(keras.losses), parts.LOSSES, parts.LOSS_REASONS),
    "metrics": (names_in(keras.metrics), parts.METRICS, parts.METRIC_REASONS),
    "optimizers": (names_in(keras.optimizers), parts.OPTIMIZERS, parts.OPTIMIZER_REASONS),
    "schedules": (names_in(keras.optimizers.schedules), parts.RATES, parts.RATE_REASONS),
    "constraints": (classes_in(keras.constraints), parts.CONSTRAINTS, {"Constraint": "the base class"}),
    "regularizers": (classes_in(keras.regularizers), parts.REGULARIZERS, {"Regularizer": "the base class"}),
    "initializers": (classes_in(keras.initializers), parts.INITIALIZERS, parts.INITIALIZER_REASONS),
    "dtype policies": (classes_in(keras.dtype_policies), models.POLICIES, models.POLICY_REASONS),
    "arguments of compile": (arguments_of(keras.Model.compile), models.OPTIONS, models.OPTION_REASONS),
    "arguments of a layer": (arguments_of(layers.Layer.__init__), models.ARGUMENTS, models.ARGUMENT_REASONS),
    "arguments of Dense": (arguments_of(layers.Dense.__init__), models.ARGUMENTS, models.ARGUMENT_REASONS),
    "arguments of an optimizer": (
        arguments_of(keras.optimizers.SGD.__init__) - {"momentum", "nesterov"},
        parts.SETTINGS,
        parts.SETTING_REASONS,
    ),
    "settings of Keras": (settings_in(keras.config), models.SETTINGS_DRAWN, models.SETTING_REASONS),
    "rules": (all_rules(), {name for name, _ in models.RULES}, {}),
}


@pytest.mark.parametrize("name", TABLES)
def test_everything_in_keras_is_drawn_or_has_a_reason(name: str) -> None:
    existing, drawn_names, reasons = TABLES[name]
    assert existing, name
    assert existing - {*drawn_names} - {*reasons} == set(), f"{name} of Keras have no draw and no reason"
    assert {*drawn_names} & {*reasons} == set()


def test_every_drawn_value_is_drawn_soon() -> None:
    jobs = [drawn(seed) for seed in range(1000)]
    tables: dict[str, Collection[Any]] = {
        "layer": LAYERS, "form": models.FORMS, "argument": models.ARGUMENTS, "loss": parts.LOSSES,
        "optimizer": parts.OPTIMIZERS, "rate": parts.RATES, "setting": parts.SETTINGS, "option": models.OPTIONS,
        "keras": models.SETTINGS_OF_KERAS, "rule": range(len(models.RULES)),
    }  # fmt: skip
    for facet, values in tables.items():
        assert {getattr(job, facet) for job in jobs} == set(values), facet
    assert {metric for job in jobs for metric in job.metrics} == {*parts.METRICS}


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")  # of drawn values that overflow
@pytest.mark.parametrize(
    ("part", "jobs"),
    [(0, FEW), *(pytest.param(part, MANY, marks=pytest.mark.slow) for part in range(PARTS))],
)
def test_one_worker_trains_as_keras_does(part: int, jobs: int, pytestconfig: pytest.Config) -> None:
    jobs = pytestconfig.getoption("pairs") or jobs
    require_equal(range(jobs) if jobs == FEW else range(part, jobs, PARTS))


def require_equal(numbers: range) -> None:
    """Compare drawn jobs with Keras."""
    texts = {job: outcome(job) for job in map(drawn, numbers)}
    failures = [job for job, text in texts.items() if text not in EXPECTED and not keras_error(job)]
    assert not failures, "\n".join(f"{job}\n    {texts[job]}" for job in failures)
    assert list(texts.values()).count("") > 0.3 * len(texts)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")  # the same
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="others compile a step the same way everywhere")
def test_one_worker_trains_as_keras_does_by_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow compiles steps by XLA without being asked only where a GPU is."""
    for name, options in models.OPTIONS.items():
        if name not in ("run_eagerly", "no jit_compile"):
            monkeypatch.setitem(options, "jit_compile", True)
    require_equal(range(IN_XLA))


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")  # the same
@pytest.mark.parametrize("number", [LOADED, pytest.param(MANY, marks=pytest.mark.slow)])
def test_a_model_that_is_loaded_without_initializers_is_the_same(number: int, tmp_path: Path) -> None:
    """As workers on JAX load it, on each backend: all variables, also those that no file has."""
    path = tmp_path / "model.keras"

    def load() -> keras.Model:
        keras.utils.set_random_seed(0)  # of generators without a seed
        model: keras.Model = keras.saving.load_model(path, compile=False, safe_mode=False)
        return model

    compared = 0
    for job in (job for job in map(drawn, range(number)) if not is_refused(job)):
        with configured(models.SETTINGS_OF_KERAS[job.keras]):
            try:
                model = prepared(job).built.model
            except Exception:  # noqa: BLE001 - Keras and its backends raise errors of any class
                continue
            path.write_bytes(archive.to_bytes(model, plain=True))
            expected, found = values_of(load()), values_of(private_keras.without_initializers(load))
        assert found.keys() == expected.keys(), job
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{job}: {name}")
        compared += 1
    assert compared > 0.4 * number


def values_of(model: keras.Model) -> dict[str, np.ndarray]:
    variables = {id(one): one for layer in private_keras.all_layers(model) for one in layer.variables}
    return {f"{place} {one.name}": numpy_value(one) for place, one in enumerate(variables.values())}


#: Jobs whose results once differed without a word, or that were refused without need.
FOUND = (
    Job(form="frozen once trained", optimizer="Adam"),
    Job(form="frozen state", rate="small"),  # with a larger one, the initial weights of JAX diverge
    Job(optimizer="Adam", rate="own class", given=True),
    Job(loss="CategoricalGeneralizedCrossEntropy"),
    Job(form="trained before", keras="mixed_float16"),
    Job(form="counted steps", optimizer="Adam", rate="PolynomialDecay"),
    Job(layer="MaxPooling3D", form="frozen once trained", optimizer="Muon"),
    Job(optimizer="SGD with momentum", setting="gradient_accumulation_steps", keras="floatx"),
)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")  # JAX has no float64
@pytest.mark.slow
@pytest.mark.parametrize("job", FOUND, ids=str)
def test_a_job_of_which_something_was_lost_trains_as_keras_does(job: Job) -> None:
    if job.form == "frozen once trained" and keras.backend.backend() == "jax":
        pytest.skip("Keras on JAX takes no step with an optimizer of more variables than are trainable")
    assert outcome(job) == ""


def frozen() -> keras.Model:
    base = keras.Sequential([keras.Input((6,)), layers.Dense(5, "relu"), layers.BatchNormalization()], name="base")
    base.trainable = False
    return keras.Sequential([keras.Input((6,)), base, layers.Dense(3)])


def lora() -> keras.Model:
    dense = layers.Dense(5, "relu")
    model = keras.Sequential([keras.Input((6,)), dense, layers.Dense(3)])
    dense.enable_lora(2)
    return model


def packed(model: keras.Model) -> KerasReplica:
    model.compile("sgd", "mse")
    file = archive.to_bytes(model)
    return KerasReplica(recipe_of(model, file).build(file))


@pytest.mark.parametrize("make_model", [frozen, lora])
def test_only_trainable_weights_are_sent(make_model: Callable[[], keras.Model]) -> None:
    model = make_model()
    numbers = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    everything = sum(int(np.prod(weight.shape)) for weight in model.weights)
    assert packed(model).size == numbers < everything / 1.2


@pytest.mark.parametrize(
    ("make_layer", "numbers"),
    [
        (lambda: models.Averaging(trainable=False), 6),
        (lambda: layers.BatchNormalization(trainable=False), 0),
        (lambda: layers.BatchNormalization(), 12),
        (lambda: layers.SpectralNormalization(layers.Dense(4), trainable=False), 4),
    ],
)
def test_the_state_of_a_frozen_layer_travels_unless_it_is_constant(
    make_layer: Callable[[], layers.Layer], numbers: int
) -> None:
    replica = packed(stack(make_layer()))
    assert replica.moving_statistics.size == numbers


def stack(*inner: Any) -> keras.Model:
    return keras.Sequential([keras.Input((6,)), *inner, layers.Dense(3, "softmax")])


def float8() -> keras.Model:
    model = stack(layers.Dense(8))
    model.layers[0].quantize("float8")
    return model


def all_frozen() -> keras.Model:
    model = stack(layers.Dense(4))
    model.trainable = False
    return model


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (float8, "a float that moves by its gradient"),
        (all_frozen, "must have trainable weights"),
        (lambda: keras.Sequential([layers.Dense(3)]), "must be built"),
    ],
)
def test_the_error_for_an_unsupported_model_gives_the_reason(
    make_model: Callable[[], keras.Model], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        packed(make_model())
