"""What a task does before its threads begin."""

from __future__ import annotations

import subprocess
import sys

from support.patience import patience


def test_what_two_threads_need_is_imported_before_there_are_two() -> None:
    """The prefetch thread's PyArrow and the training thread's Keras both import pandas, which is circular in itself."""
    program = (
        "import sys\nfrom distkeras.training.task import prepare_process\nprepare_process(1, None)\n"
        "assert 'pandas' in sys.modules and 'keras' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=patience(120))
