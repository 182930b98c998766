"""Archives of models as bytes, the choice of the backend, custom objects."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark import cloudpickle
from support.patience import patience

from distkeras.keras_model import archive
from distkeras.ps.errors import ConfigurationError


def small() -> keras.Model:
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(2)])


def python(code: str, stdin: bytes = b"", backend: str | None = None) -> subprocess.CompletedProcess[bytes]:
    env = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"} | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    if backend:
        env["KERAS_BACKEND"] = backend
    command = [sys.executable, "-c", code]
    return subprocess.run(command, input=stdin, capture_output=True, env=env, timeout=patience(120))


def test_a_model_is_saved_and_loaded_uncompiled() -> None:
    model = small()
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    model.train_on_batch(x, np.zeros((5, 2)))
    again = archive.from_bytes(archive.to_bytes(model))
    assert not again.compiled
    np.testing.assert_allclose(again.predict_on_batch(x), model.predict_on_batch(x), rtol=1e-6)


KILLED_WHILE_LOADING = """
import os, signal, sys
import keras, numpy as np
from distkeras.keras_model import archive

@keras.saving.register_keras_serializable("mine")
class Fatal(keras.layers.Layer):
    def call(self, x):
        return x

    def load_own_variables(self, store):
        os.kill(os.getpid(), signal.SIGKILL)

inputs = keras.Input((2,), dtype="int64")
outputs = keras.layers.Embedding(9, 3)(inputs)
if sys.argv[1:] == ["vocabulary"]:
    lookup = keras.layers.IntegerLookup()
    lookup.adapt(np.arange(5))
    outputs = keras.layers.Embedding(9, 3)(lookup(inputs))
data = archive.to_bytes(keras.Model(inputs, Fatal()(outputs)))
print("made", flush=True)
archive.from_bytes(data)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "assets",
    [pytest.param([], id=""), pytest.param(["vocabulary"], id="with a vocabulary")],
)
def test_a_process_that_is_killed_while_it_loads_a_model_leaves_no_file(tmp_path: Path, assets: list[str]) -> None:
    """Only the files that Keras unpacks remain, in Spark's own folder, which ends with the application."""
    ours, sparks = tmp_path / "ours", tmp_path / "sparks"
    ours.mkdir()
    sparks.mkdir()
    environment = os.environ | {"TMPDIR": str(ours), "SPARK_LOCAL_DIRS": f"{sparks},/elsewhere"}
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_LOADING, *assets],
        capture_output=True,
        env=environment,
        timeout=patience(120),
    )
    assert (done.stdout, done.returncode) == (b"made\n", -signal.SIGKILL), done.stderr
    assert list(ours.iterdir()) == []
    assert bool(list(sparks.iterdir())) == bool(assets)


class Halved(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(2)

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        return self.inner(x) / 2


def built_by_name_only() -> keras.Model:
    """Return a model that claims to be built although its layer has no weights yet."""
    model = Halved()
    model.built = True
    return model


def model_without_input() -> keras.Model:
    return keras.Sequential([keras.layers.Dense(2)])


@pytest.mark.parametrize(
    "model", [model_without_input, Halved, built_by_name_only, lambda: "model.keras", lambda: None]
)
def test_a_model_that_is_not_built_is_refused(model: Callable[..., Any] | type[Halved]) -> None:
    with pytest.raises(ConfigurationError, match="`model` must be"):
        archive.to_bytes(model())


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 not really", archive.to_bytes(small())[:-40]])
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigurationError, match=r"`data` must be a \.keras archive"):
        archive.from_bytes(data)


def test_a_lambda_is_refused_on_load() -> None:
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Lambda(lambda x: x + 1)])
    with pytest.raises(ConfigurationError, match="Keras said"):
        archive.from_bytes(archive.to_bytes(model))


@keras.saving.register_keras_serializable("tests_models")
class Scaled(keras.layers.Layer):
    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        return 3.0 * x


@keras.saving.register_keras_serializable("tests_models")
class Unused(keras.layers.Layer):
    pass


def test_only_the_custom_objects_of_a_model_are_sent() -> None:
    data = archive.to_bytes(keras.Sequential([keras.layers.Input((3,)), Scaled()]))
    assert dict(archive.custom_objects(data)) == {"tests_models>Scaled": Scaled}
    assert archive.custom_objects()["tests_models>Unused"] is Unused
    with keras.saving.custom_object_scope({"mine": Unused}):
        assert archive.custom_objects()["mine"] is Unused


@pytest.mark.slow  # `training/test_models` does this in workers
def test_custom_objects_load_in_a_process_that_has_not_imported_them() -> None:
    data = archive.to_bytes(keras.Sequential([keras.layers.Input((3,)), Scaled()]))
    source = "\n".join(
        [
            "import keras",
            "@keras.saving.register_keras_serializable('tests_models')",
            "class Scaled(keras.layers.Layer):",
            "    def call(self, x): return 3.0 * x",
        ]
    )
    space: dict[str, object] = {"__name__": "__main__"}
    exec(source, space)
    try:
        shipped = cloudpickle.dumps((data, archive.custom_objects(data)))
    finally:
        keras.saving.register_keras_serializable("tests_models", "Scaled")(Scaled)
    done = python(
        "import sys, numpy as np\n"
        "from pyspark import cloudpickle\n"
        "data, objects = cloudpickle.loads(sys.stdin.buffer.read())\n"
        "from distkeras.keras_model import archive\n"
        "print(archive.from_bytes(data, objects).predict_on_batch(np.ones((1, 3))).tolist())",
        shipped,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split("\n")[0] == "[[3.0, 3.0, 3.0]]"


@pytest.mark.slow
def test_the_backend_is_set_before_keras_is_imported() -> None:
    done = python(
        "from distkeras.keras_model import archive\n"
        "import sys; assert 'keras' not in sys.modules\n"
        "archive.ensure_backend('tensorflow')\n"
        "import keras; print(keras.backend.backend())",
        backend="jax",
    )
    assert done.stdout.decode().strip() == "tensorflow", done.stderr.decode()


def test_another_backend_is_refused() -> None:
    archive.ensure_backend(keras.backend.backend())
    other = "jax" if keras.backend.backend() != "jax" else "torch"
    with pytest.raises(ConfigurationError, match=f"must run on the backend '{other}'"):
        archive.ensure_backend(other)
    with pytest.raises(ConfigurationError, match="`name` must be one of"):
        archive.ensure_backend("theano")


def test_a_backend_that_does_not_train_is_refused_before_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    monkeypatch.setattr(keras.config, "backend", lambda: "openvino")
    with pytest.raises(ConfigurationError, match=r"must run on tensorflow, jax, torch: .* Received: 'openvino'"):
        archive.to_bytes(model)


def test_unpickling_custom_objects_sets_the_backend_first() -> None:
    settling = type(archive.CustomObjects().__reduce__()[1][0])("theano")
    with pytest.raises(ConfigurationError, match="`name` must be one of"):
        pickle.loads(pickle.dumps(settling))
