"""The recipe by which a worker rebuilds the driver's model: backend, custom objects, and arguments of ``compile``.

The arguments are packed for workers; checks name the invalid one.
"""

from __future__ import annotations

import copy
import difflib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distkeras.data.losses import CHOSEN_BY_LABELS, has_own_step
from distkeras.keras_model.archive import (
    CustomObjects,
    attributes_in,
    custom_objects,
    ensure_backend,
    from_bytes,
    frozen_since,
    has_optimizer_state,
    load_optimizer_state,
    read_config,
    require_objects,
    running_backend,
    trusted_code,
)
from distkeras.keras_model.attributes import Attributes, attributes_of, lost, set_attributes, set_attributes_of_model
from distkeras.keras_model.keras_config import Settings, applied, settings_now, use
from distkeras.keras_model.optimizers import inner_optimizer, optimizer_of
from distkeras.keras_model.variables import select
from distkeras.private_keras import compile_arguments, keys_of, set_undecayed, undecayed
from distkeras.ps.errors import ConfigurationError, headline
from distkeras.ps.protocol.layout import Layout
from distkeras.ps.validate import require_number
from distkeras.spark.daemon import import_keras

if TYPE_CHECKING:
    import keras


#: Keys of a configuration whose values follow from others, or differ from one process to the next.
_LEFT_OUT = {"build_config", "build_input_shape", "compile_config", "module", "seed", "shared_object_id"}
#: Keys of a configuration under which it refers to layers by their names.
_REFERENCES = {"name", "keras_history", "input_layers", "output_layers"}


def model_identity(model_file: bytes) -> dict[str, Any]:
    """Return the configuration in a ``.keras`` archive, JSON-ready, with layers numbered instead of named.

    Keras numbers default names in the order in which a process builds layers, so the same code makes "dense" once and
    "dense_7" another time. Keys with the value None are left out: a later version of Keras may add some.
    """
    config = read_config(model_file)
    names = {name: f"#{number}" for number, name in enumerate(dict.fromkeys(layer_names(config)))}
    identity: dict[str, Any] = _canonical(config, names, reference=False)
    attributes = attributes_in(model_file)
    # Layers have numbers in their names, and stay in their order.
    return identity | {"attributes": [entry[1:] for entry in attributes]} if attributes else identity


def layout_identity(layout: Layout) -> list[list[Any]]:
    """Return the last part of each variable's name, and its shape, JSON-ready."""
    return [[name.rsplit("/", 1)[-1], list(shape)] for name, shape in zip(layout.names, layout.shapes, strict=True)]


def layer_names(node: Any) -> Iterator[str]:
    """Yield the names of layers, at any depth, in the order of their first appearance."""
    if isinstance(node, Mapping):
        config = node.get("config")
        # Losses and dtype policies have names too, which are significant.
        if isinstance(config, Mapping) and not config.keys().isdisjoint(("trainable", "batch_shape", "layers")):
            yield str(config.get("name"))
        for value in node.values():
            yield from layer_names(value)
    elif isinstance(node, list):
        for value in node:
            yield from layer_names(value)


def _canonical(node: Any, names: Mapping[str, str], *, reference: bool) -> Any:
    if isinstance(node, Mapping):
        return {
            key: _canonical(value, names, reference=reference or key in _REFERENCES)
            for key, value in node.items()
            if key not in _LEFT_OUT and value is not None
        }
    if isinstance(node, list):
        return [_canonical(value, names, reference=reference) for value in node]
    return names.get(node, node) if reference and isinstance(node, str) else node


@dataclass(frozen=True)
class Recipe:
    """Everything that a model needs in addition to its file. It travels in Spark's own task closure.

    Args:
        arguments: the arguments of ``compile``: names, plain functions, which may come from a notebook, and
            configurations of Keras objects.
        optimizer_state: the optimizer is the model's own and has taken steps: training continues from its state.
        optimizer_variables: of this optimizer, from `archive.frozen_since`.
        steps: the steps from which the schedule of the model's own optimizer counts, if it has no other state.
        settings: those of ``keras.config`` on the driver, which losses and layers read while they compute.
        trusted: of the archive whose lambdas may run, from `trusted_code`; "" for none.
        undecayed: numbers of the weights that the optimizer excludes from weight decay one by one.
        jit_compile: what "auto" means on the driver: on TensorFlow it depends on the devices of a process. None: the
            same everywhere.
    """

    backend: str
    objects: CustomObjects
    arguments: Mapping[str, Any]
    optimizer_state: bool = False
    optimizer_variables: tuple[int, ...] = ()
    steps: int = 0
    settings: Settings = field(default_factory=dict)
    trusted: str = ""
    undecayed: tuple[int, ...] = ()
    jit_compile: bool | None = None

    def begin_task(self) -> None:
        """Import Keras with the backend, and set ``keras.config``, for good: in a task, never on the driver."""
        ensure_backend(self.backend)
        import_keras()
        use(self.settings)

    @property
    def continues(self) -> bool:
        """Return whether training continues from a state of the model's own optimizer."""
        return self.optimizer_state or self.steps > 0

    def build(self, model_file: bytes, *, to_train: bool = False) -> keras.Model:
        """Return the compiled model in this process, whose ``keras.config`` is afterwards as it was.

        Args:
            to_train: load the optimizer state of the driver's model.

        Raises:
            ConfigurationError: Keras already runs on another backend here, or a part cannot be rebuilt.
        """
        ensure_backend(self.backend)
        import keras

        named = keras.saving.custom_object_scope(self.objects) if self.objects else nullcontext()
        with applied(self.settings), named:
            model = from_bytes(model_file, self.objects, trusted=self.trusted)
            arguments = {name: unpack(name, value) for name, value in self.arguments.items()}
            if self.jit_compile is not None:
                arguments.setdefault("jit_compile", self.jit_compile)
            try:
                model.compile(**arguments)
            except (TypeError, ValueError, KeyError) as error:
                raise ConfigurationError(
                    "optimizer, loss and metrics must be what Keras compiles a model with. "
                    f"Received: {arguments}; Keras said: {headline(str(error))}"
                ) from error
            set_attributes_of_model(model, attributes_in(model_file))  # `compile` may have set some of them
            if self.undecayed:
                inner = inner_optimizer(model.optimizer)
                set_undecayed(inner, keys_of(inner, select(model.weights, self.undecayed)))
            if to_train and self.optimizer_state:
                load_optimizer_state(model, model_file, self.optimizer_variables)
            elif to_train and self.steps:
                model.optimizer.iterations.assign(self.steps)
        return model

    def identity(self, model: keras.Model) -> dict[str, Any]:
        """Return the arguments with which `build` compiles a ``model``, JSON-ready; user's functions by name."""
        import keras

        optimizer = _as_json(keras.saving.serialize_keras_object(model.optimizer))
        optimizer["config"].pop("name", None)
        given = self.arguments.get("optimizer")
        if isinstance(given, PackedObject) and given.attributes:
            optimizer["attributes"] = _as_json(given.attributes)
        if self.undecayed:
            optimizer["undecayed"] = list(self.undecayed)
        return {name: _as_json(value) for name, value in self.arguments.items()} | {"optimizer": optimizer}


def recipe_of(  # noqa: PLR0913 - the arguments of `compile`, by their keywords
    model: keras.Model,
    model_file: bytes,
    *,
    optimizer: Any = None,
    loss: Any = None,
    metrics: Any = None,
    loss_weights: Any = None,
    weighted_metrics: Any = None,
    objects: Mapping[str, Any] | None = None,
    labels: bool = True,
) -> Recipe:
    """Return the recipe for ``model``; an argument that is None is taken from the model's own compilation.

    Args:
        labels: there are labels. Without them, and with a step of the user's own, the model need not have a loss.

    Raises:
        ConfigurationError: there is no loss, or an argument has no configuration.
    """
    import keras

    from distkeras.keras_model.lazy_optimizers import LAZY

    if isinstance(optimizer, str) and optimizer.lower() in LAZY:
        optimizer = optimizer_of(optimizer)  # Keras does not know it by this name
    options = {
        "optimizer": optimizer,
        "loss": loss,
        "metrics": list(metrics) if isinstance(metrics, tuple) else metrics,
        "loss_weights": loss_weights,
        "weighted_metrics": weighted_metrics,
    }
    compiled = compile_arguments(model)
    own = {**compiled, "optimizer": (model.optimizer if model.compiled else None) or compiled.get("optimizer")}
    arguments = {name: own.get(name) if value is None else value for name, value in options.items()}
    if arguments["optimizer"] is None:
        arguments["optimizer"] = "sgd"
    if arguments["loss"] is None and labels and not has_own_step(model):
        raise ConfigurationError(
            "`loss` must be given, or the model be compiled with one; `label_col=None` trains without labels and by "
            "`add_loss` alone. Received: loss=None and "
            f"model={model.name!r}, compiled={model.compiled}"
        )
    packed = {name: pack(name, value) for name, value in arguments.items() if value is not None}
    classes = custom_objects(model_file, configurations_in(packed))
    own_classes = (kind for value in arguments.values() for kind in classes_in(value))
    classes.update((keras.saving.get_registered_name(kind), kind) for kind in own_classes)
    classes.update(require_objects(objects))
    with keras.saving.custom_object_scope(classes):
        packed = {name: with_attributes(name, arguments[name], value) for name, value in packed.items()}
        for name, value in packed.items():
            require_described(name, arguments[name], value)
    packed.update(_flags(model, own_optimizer=optimizer is None))
    continued = optimizer is None or optimizer is getattr(model, "optimizer", None)
    continues = continued and has_optimizer_state(model)
    return Recipe(
        running_backend(),
        classes,
        packed,
        optimizer_state=continues,
        optimizer_variables=frozen_since(model) if continues else (),
        steps=_first_step(model) if continued and not continues else 0,
        settings=settings_now(),
        trusted=trusted_code(model_file),
        undecayed=_undecayed(model, arguments["optimizer"]),
        jit_compile=bool(model.jit_compile) if running_backend() == "tensorflow" else None,
    )


def _first_step(model: keras.Model) -> int:
    """Return the steps that the user has set for an optimizer that has taken none."""
    optimizer = model.optimizer if model.compiled else None
    return 0 if optimizer is None or optimizer.built else int(optimizer.iterations)


def _undecayed(model: keras.Model, optimizer: Any) -> tuple[int, ...]:
    """Return the numbers of a model's weights that an optimizer excludes from weight decay by their keys."""
    inner = inner_optimizer(optimizer)
    excluded = undecayed(inner)
    keys = keys_of(inner, model.weights) if excluded else []
    return tuple(number for number, key in enumerate(keys) if key in excluded)


def _flags(model: keras.Model, *, own_optimizer: bool) -> dict[str, bool]:
    """Return the other arguments of ``compile`` that change how a worker trains, if they are not the defaults."""
    import keras

    if not model.compiled:
        return {}
    compiled = compile_arguments(model)
    flags = {name: compiled[name] for name in ("run_eagerly", "jit_compile") if isinstance(compiled.get(name), bool)}
    if not flags.get("run_eagerly"):
        flags.pop("run_eagerly", None)
    scales = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    if own_optimizer and not scales and model.dtype_policy.name == "mixed_float16":
        flags["auto_scale_loss"] = False  # Keras would wrap the optimizer otherwise
    return flags


def _as_json(value: Any) -> Any:
    if isinstance(value, PackedObject):
        config = _as_json(value.config)
        return {"config": config, "attributes": _as_json(value.attributes)} if value.attributes else config
    if isinstance(value, Mapping):
        numbered = _default_name(value)
        return {
            str(key): _as_json({k: v for k, v in part.items() if k != "name"} if numbered and key == "config" else part)
            for key, part in value.items()
            if key not in ("module", "shared_object_id")
        }
    if isinstance(value, (list, tuple)):
        return [_as_json(part) for part in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return f"function {getattr(value, '__qualname__', type(value).__qualname__)}"


def _default_name(value: Mapping[str, Any]) -> bool:
    """Return whether the configuration of an object has the name that Keras has given it, and numbers: "adam_1"."""
    name, config = value.get("class_name"), value.get("config")
    if not isinstance(name, str) or not isinstance(config, Mapping) or not isinstance(config.get("name"), str):
        return False
    default = re.sub("([a-z])([A-Z])", r"\1_\2", re.sub("(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))).lower()
    return re.fullmatch(re.escape(default) + r"_\d+", config["name"]) is not None or config["name"] == default


#: The trainer's name of an argument, if it differs from that of ``compile``.
_KEYWORDS = {"optimizer": "worker_optimizer"}
_KERAS_ERRORS = (TypeError, ValueError, KeyError, AttributeError, NotImplementedError)


@dataclass(frozen=True)
class PackedObject:
    """A Keras object as its configuration and the plain attributes that this lacks.

    An object that has been used holds tensors, and cannot be sent.
    """

    config: dict[str, Any]
    attributes: Attributes = ()


def pack(name: str, value: Any) -> Any:
    """Return an argument of ``compile`` with Keras' objects as `PackedObject`; ConfigurationError if it is invalid."""
    import keras

    keyword = _KEYWORDS.get(name, name)
    if isinstance(value, Mapping | list | tuple) and (value or name in ("metrics", "weighted_metrics")):
        if isinstance(value, Mapping):
            return {key: pack(name, part) for key, part in value.items()}
        return [pack(name, part) for part in value]
    if name == "loss_weights":
        return require_number(name, value, -math.inf)
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, type):
        raise ConfigurationError(f"`{keyword}` must be made: `{value.__name__}()`. Received: the class {value!r}")
    if hasattr(value, "get_config"):
        try:
            return PackedObject(keras.saving.serialize_keras_object(value))
        except _KERAS_ERRORS as error:
            raise ConfigurationError(
                f"`{keyword}` must be described by its `get_config`. Received: {value!r}; "
                f"Keras said: {headline(str(error))}"
            ) from error
    if callable(value) and name != "optimizer":
        return value
    expected = (
        "an optimizer of Keras 3, or the name of one" if name == "optimizer" else "a name, a function or an object"
    )
    raise ConfigurationError(f"`{keyword}` must be {expected}. Received: {keyword}={value!r} of {type(value)}")


def with_attributes(name: str, given: Any, packed: Any) -> Any:
    """Return ``packed``, of ``given``, with the plain attributes of each object that its configuration lacks."""
    if isinstance(packed, Mapping):
        return {key: with_attributes(name, given[key], part) for key, part in packed.items()}
    if isinstance(packed, list):
        return [with_attributes(name, one, part) for one, part in zip(given, packed, strict=True)]
    if not isinstance(packed, PackedObject):
        return packed
    try:
        rebuilt = unpack(name, packed)
    except ConfigurationError:  # as in `require_described`
        return packed
    return replace(packed, attributes=attributes_of(given, rebuilt))


def require_described(name: str, given: Any, packed: Any) -> None:
    """Raise ConfigurationError if ``given``, an argument of ``compile``, has an attribute that is not in ``packed``."""
    try:
        rebuilt = unpack(name, packed)
    except ConfigurationError:  # the classes may be known to the workers only; building the model raises a better error
        return
    keyword = _KEYWORDS.get(name, name)
    lost_properties = lost(given, rebuilt)
    if lost_properties is not None:
        raise ConfigurationError(
            f"`{keyword}` must be described by its `get_config`, from which workers rebuild it. "
            f"Received: {given!r}, of which {lost_properties}"
        )


def classes_in(value: Any) -> Iterator[type]:
    """Yield the user's own classes among the objects of an argument, which travel by value like functions."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from classes_in(part)
    elif hasattr(value, "get_config") and type(value).__module__.partition(".")[0] != "keras":
        yield type(value)


def configurations_in(packed: Any) -> Iterator[dict[str, Any]]:
    """Yield the configurations of Keras' objects in arguments that `pack` has returned."""
    if isinstance(packed, Mapping):
        packed = list(packed.values())
    if isinstance(packed, list):
        for part in packed:
            yield from configurations_in(part)
    elif isinstance(packed, PackedObject):
        yield packed.config


def unpack(name: str, value: Any) -> Any:
    """Reverse `pack`; raise ConfigurationError for a class or name that Keras does not know."""
    if isinstance(value, Mapping):
        return {key: unpack(name, part) for key, part in value.items()}
    if isinstance(value, list):
        return [unpack(name, part) for part in value]
    if isinstance(value, str):
        _require_known(name, value)
    if not isinstance(value, PackedObject):
        return value
    import keras

    try:
        rebuilt = keras.saving.deserialize_keras_object(copy.deepcopy(value.config))  # some classes modify it
        set_attributes(rebuilt, value.attributes)
        return rebuilt
    except _KERAS_ERRORS as error:
        raise ConfigurationError(
            f"`{_KEYWORDS.get(name, name)}` must be of Keras' classes and of registered ones: decorate your own with "
            "`@keras.saving.register_keras_serializable()`, or name them in `custom_objects`. "
            f"Received: {value.config.get('class_name')}; Keras said: {headline(str(error))}"
        ) from error


def _require_known(name: str, text: str) -> None:
    import keras

    kinds = {"optimizer": keras.optimizers, "loss": keras.losses}
    kinds |= dict.fromkeys(("metrics", "weighted_metrics"), keras.metrics)
    if name not in kinds or text.lower() in CHOSEN_BY_LABELS.get(name, ()):
        return
    try:
        kinds[name].get(text)
    except _KERAS_ERRORS:
        known = {public.lower(): public for public in dir(kinds[name]) if not public.startswith("_")}
        near = difflib.get_close_matches(text.lower(), known, 1)
        hint = f" (or is it {known[near[0]]!r}?)" if near else ""
        keyword = _KEYWORDS.get(name, name)
        raise ConfigurationError(
            f"`{keyword}` must be a name that Keras knows, or a registered one{hint}. Received: {text!r}"
        ) from None
