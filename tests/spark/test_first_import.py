"""The first import of Keras, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.patience import patience


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(60), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_keras_without_pictures() -> None:
    run("""
import gc
from distkeras.spark.first_import import import_keras
import_keras()
from keras.src.visualization import plot_image_gallery
assert plot_image_gallery.plt is None
assert gc.isenabled() and gc.get_freeze_count() > 100_000
import matplotlib.pyplot
""")


@pytest.mark.slow
def test_another_thread_may_make_pictures_meanwhile() -> None:
    run("""
import builtins, sys, threading
from distkeras.spark.first_import import import_keras

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
""")


@pytest.mark.slow
def test_what_a_process_has_imported_is_left_alone() -> None:
    run("""
import gc, keras
gc.disable()
from distkeras.spark.first_import import import_keras
import_keras()
assert not gc.isenabled() and gc.get_freeze_count() == 0
""")


def test_a_backend_that_is_not_there_is_named_and_nothing_stays_changed() -> None:
    run("""
import gc, os, sys
os.environ["KERAS_BACKEND"] = "unknown"
from distkeras.spark.first_import import import_keras
try:
    import_keras()
except ValueError as error:
    assert "unknown" in str(error)
else:
    raise AssertionError
assert gc.isenabled() and not any(type(finder).__module__.startswith("distkeras") for finder in sys.meta_path)
""")


@pytest.mark.slow
def test_a_driver_has_its_pictures_and_lets_go_of_what_it_had() -> None:
    run("""
import gc
from distkeras.spark.first_import import import_keras
import_keras(on_driver=True)
from keras.src.visualization import plot_image_gallery
assert plot_image_gallery.plt is not None
assert gc.isenabled() and gc.get_freeze_count() == 0
""")
