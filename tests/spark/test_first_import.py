"""The first import of Keras in a process."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from support.programs import output_of

needs_jax = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("jax", "tensorflow"))), reason="JAX and TensorFlow must be installed"
)


@pytest.mark.slow
def test_a_worker_imports_keras_without_matplotlib() -> None:
    output_of(
        "-c",
        """
import gc
from distkeras.spark.daemon import import_keras
import_keras()
from keras.src.visualization import plot_image_gallery
assert plot_image_gallery.plt is None
assert gc.isenabled() and gc.get_freeze_count() > 100_000
import matplotlib.pyplot
""",
    )


def test_the_import_starts_no_runtime_before_the_fork() -> None:
    """A runtime reads which GPUs it may use when it starts, and does not survive a fork."""
    output_of(
        "-c",
        """
from distkeras.spark.daemon import import_keras
import_keras()
import keras
if keras.config.backend() == "tensorflow":
    import tensorflow as tf
    tf.config.threading.set_inter_op_parallelism_threads(3)  # raises once the runtime has started
elif keras.config.backend() == "jax":
    import jax
    jax.config.update("jax_num_cpu_devices", 3)  # the same
    assert len(jax.devices()) == 3
else:
    import torch
    assert not torch.cuda.is_initialized()
""",
    )


@pytest.mark.slow
def test_another_thread_may_import_matplotlib_meanwhile() -> None:
    output_of(
        "-c",
        """
import builtins, sys, threading
from distkeras.spark.daemon import import_keras

own = builtins.__import__

def watched(name, *rest, **others):
    if name.startswith("matplotlib") and threading.current_thread() is threading.main_thread():
        builtins.__import__ = own
        thread = threading.Thread(target=lambda: own("matplotlib"))
        thread.start()
        thread.join(30)
        assert "matplotlib" in sys.modules
    return own(name, *rest, **others)

builtins.__import__ = watched
import_keras()
assert builtins.__import__ is own
""",
    )


@pytest.mark.slow
def test_a_process_that_has_imported_keras_is_not_changed() -> None:
    output_of(
        "-c",
        """
import gc, keras
gc.disable()
from distkeras.spark.daemon import import_keras
import_keras()
assert not gc.isenabled() and gc.get_freeze_count() == 0
""",
    )


def test_the_error_for_a_missing_backend_names_it_and_nothing_stays_changed() -> None:
    output_of(
        "-c",
        """
import gc, os, sys
os.environ["KERAS_BACKEND"] = "unknown"
from distkeras.spark.daemon import import_keras
before = list(sys.meta_path)
try:
    import_keras()
except ValueError as error:
    assert "unknown" in str(error)
else:
    raise AssertionError
new = [finder for finder in sys.meta_path if finder not in before]
assert gc.isenabled() and not any(type(finder).__module__.startswith("distkeras") for finder in new)
""",
    )


@pytest.mark.slow
def test_a_driver_imports_matplotlib_and_does_not_freeze_its_objects() -> None:
    output_of(
        "-c",
        """
import gc
from distkeras.spark.daemon import import_keras
import_keras(on_driver=True)
from keras.src.visualization import plot_image_gallery
assert plot_image_gallery.plt is not None
assert gc.isenabled() and gc.get_freeze_count() == 0
""",
    )


@needs_jax
def test_keras_on_jax_reads_configurations_without_tensorflow_which_can_still_be_imported() -> None:
    output_of(
        "-c",
        """
import sys
from distkeras.spark.daemon import import_keras
import_keras()
import keras
rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
keras.layers.Bidirectional(keras.layers.SimpleRNN(2))
keras.optimizers.SGD.from_config(keras.optimizers.SGD(rate).get_config())
assert "tensorflow" not in sys.modules
keras.layers.StringLookup(vocabulary=["a", "b"])
import tensorflow as tf
assert keras.saving.serialize_keras_object(tf.TensorShape([1, 2])) == [1, 2]
""",
        KERAS_BACKEND="jax",
    )


@needs_jax
def test_workers_train_predict_and_evaluate_on_jax_without_tensorflow(tmp_path: Path) -> None:
    program = "support.training.without_tensorflow"
    printed = output_of("-m", program, seconds=240, KERAS_BACKEND="jax", NOTES=str(tmp_path))
    found = json.loads(printed.strip().splitlines()[-1])
    assert {step: set(imported) for step, imported in found.items()} == {
        "training": {False}, "prediction": {False}, "evaluation": {False},
    }  # fmt: skip


@needs_jax
@pytest.mark.parametrize("on_driver", [False, True])
def test_a_worker_on_jax_computes_in_its_own_thread_and_a_driver_as_it_was(on_driver: bool) -> None:
    program = (
        f"from distkeras.spark.daemon import import_keras\nimport_keras(on_driver={on_driver})\n"
        "import jax\nassert jax.numpy.ones(2).sum() == 2\n"
        f"assert jax.config.values['jax_cpu_enable_async_dispatch'] is {on_driver}\n"
    )
    output_of("-c", program, KERAS_BACKEND="jax")
