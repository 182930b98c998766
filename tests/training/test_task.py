"""The preparation of a task's process, before its threads start."""

from __future__ import annotations

from support.programs import output_of


def test_pandas_is_imported_before_the_threads_start() -> None:
    """The prefetch thread's PyArrow and the training thread's Keras both import pandas, which imports itself."""
    program = (
        "import sys\nfrom distkeras.training.task import prepare_process\nprepare_process(1, None)\n"
        "assert 'pandas' in sys.modules and 'keras' not in sys.modules\n"
    )
    output_of("-c", program)
