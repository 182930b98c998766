"""The preparation of a task's process, before its threads start."""

from __future__ import annotations

import pytest
from support.programs import output_of

from distkeras.ps.errors import ConfigurationError
from distkeras.spark.task_process import visible_devices


def test_pandas_is_imported_before_the_threads_start() -> None:
    """The prefetch thread's PyArrow and the training thread's Keras both import pandas, which imports itself."""
    program = (
        "import sys\nfrom distkeras.spark.task_process import prepare_process\nprepare_process(1)\n"
        "assert 'pandas' in sys.modules and 'keras' not in sys.modules\n"
    )
    output_of("-c", program)


@pytest.mark.parametrize(
    ("listed", "addresses", "visible"),
    [
        (None, ["1"], "1"),
        ("4,5", ["1"], "5"),
        ("4, 5,6", ["2", "0"], "6,4"),
        ("4,5", ["4"], "4"),
        ("GPU-aa,GPU-bb", ["GPU-bb"], "GPU-bb"),
        ("GPU-aa,GPU-bb", ["1"], "GPU-bb"),
        ("", ["0"], ""),
        ("-1", ["0"], "-1"),
        (None, [], None),
        ("4", [], "4"),
        ("4,5", [], "5"),  # of worker 3
    ],
)
def test_a_task_sees_the_gpus_that_spark_assigns(listed: str | None, addresses: list[str], visible: str | None) -> None:
    assert visible_devices(listed, addresses, worker=3) == visible


@pytest.mark.parametrize("addresses", [["2"], ["0", "7"], ["GPU-cc"]])
def test_a_gpu_that_the_executor_does_not_list_is_refused(addresses: list[str]) -> None:
    text = f"addresses {', '.join(addresses)} with CUDA_VISIBLE_DEVICES=4,5"
    with pytest.raises(ConfigurationError, match=text):
        visible_devices("4,5", addresses, worker=0)


@pytest.mark.slow
def test_a_process_that_computes_is_not_given_other_gpus() -> None:
    program = """
import os, sys
from types import ModuleType
from distkeras.ps.errors import NodeError
from distkeras.spark.task_process import prepare_process

prepare_process(1, ["0"])
prepare_process(1, ["1"])  # no backend is imported yet
assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
sys.modules["torch"] = ModuleType("torch")
prepare_process(1, ["1"])
prepare_process(1)  # a task without GPUs of its own computes where the process does
try:
    prepare_process(1, ["0"])
except NodeError as error:
    assert "CUDA_VISIBLE_DEVICES=4. Received: a process of an earlier task with 5" in str(error), error
else:
    raise AssertionError
assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
"""
    output_of("-c", program, CUDA_VISIBLE_DEVICES="4,5")
