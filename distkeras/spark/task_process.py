"""The process of a task, before a backend starts in it: its threads, and the GPUs that Spark has assigned to the task.

A backend reads the environment once. Spark runs one task after another in a Python worker, and may assign other GPUs to
the next one. So a worker ends after its task if its executor has GPUs other than those of the task. Importing this
module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from distkeras.ps.errors import ConfigurationError, NodeError

if TYPE_CHECKING:
    from pyspark import TaskContext

_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: The devices that the executor lists; None: all of the machine.
_LISTED = os.environ.get(_VISIBLE)
#: The setting of Spark for the GPUs of an executor. A query's tasks have the session's settings as local properties.
_AMOUNT = "spark.executor.resource.gpu.amount"
_BACKENDS = ("tensorflow", "jax", "torch")
#: Whether a task was prepared in this process.
_prepared = False


def task_context(what: str = "a task") -> TaskContext:
    """Return the context of the Spark task that calls this; if there is none, ConfigurationError names ``what``."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise ConfigurationError(f"{what} must run inside Spark. Received: no task context")
    return context


def prepare_task(threads: int | None = None) -> None:
    """Prepare the process of the task that calls this, for ``threads`` or the task's cores; outside tasks do nothing.

    Raises:
        ConfigurationError: Spark has assigned a GPU that the executor does not list.
        NodeError: the process computes on other GPUs for an earlier task; another attempt gets another process.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        return
    gpu = context.resources().get("gpu")
    addresses = gpu.addresses if gpu else []
    if (context.getLocalProperty(_AMOUNT) or "0") != str(len(addresses)):
        _end_after_task()
    prepare_process(threads or context.cpus(), addresses, worker=context.partitionId())


def prepare_process(threads: int, addresses: Sequence[str] = (), *, worker: int = 0) -> None:
    """Set the environment variables that libraries read on their first use, unless the user has set them.

    ``addresses`` are those of the GPUs that Spark has assigned to a task, which is that of ``worker``.
    """
    global _prepared
    settings = {
        # Each core has a worker: more threads would only compete for the cores.
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": "1",
        "OMP_NUM_THREADS": str(threads),
        "PJRT_NPROC": str(threads),  # JAX's on processors
        # Several workers may share a GPU; by default the first one would take all of its memory.
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    devices = visible_devices(_LISTED, addresses, worker)
    now = os.environ.get(_VISIBLE)
    computes = _prepared and any(name in sys.modules for name in _BACKENDS)
    if addresses and devices != now and computes:
        raise NodeError(
            f"the Python process of a task must see the GPUs that Spark assigns to the task, {_VISIBLE}={devices}. "
            f"Received: a process of an earlier task with {'all GPUs' if now is None else now}",
            worker=worker,
        )
    if devices is not None and not computes:
        os.environ[_VISIBLE] = devices
    _prepared = True
    # PyArrow and Keras import it on first use: of two threads at once, one would see it half imported.
    import pandas  # noqa: F401 - imported for its side effect


def visible_devices(listed: str | None, addresses: Sequence[str], worker: int) -> str | None:
    """Return ``CUDA_VISIBLE_DEVICES`` for a task, from the executor's own value; None leaves it unset.

    Addresses are places in the executor's list, or names in it. Without addresses, workers take the devices of a list
    in turn.
    """
    names = [name.strip() for name in (listed or "").split(",") if name.strip()]
    if listed is not None and names in ([], ["-1"]):  # the user wants no GPU
        return listed
    if not addresses:
        return listed if len(names) < 2 else names[worker % len(names)]
    places = [int(address) if address.isdecimal() else len(names) for address in addresses]
    if listed is None:
        return ",".join(addresses)
    if max(places) < len(names):
        return ",".join(names[place] for place in places)
    if set(addresses) <= set(names):
        return ",".join(addresses)
    raise ConfigurationError(
        f"the GPUs that Spark assigns to a task must be places in the executor's {_VISIBLE}, or names in it. "
        f"Received: addresses {', '.join(addresses)} with {_VISIBLE}={listed}",
        worker=worker,
    )


def _end_after_task() -> None:
    """Let Spark not reuse this Python worker, without a failure.

    PySpark has no public way. A worker that Spark must not reuse says after its results that another section ends,
    instead of the stream. Where PySpark has no such place, `prepare_process` finds a process with other GPUs.
    """
    import pyspark.worker
    from pyspark.serializers import SpecialLengths, write_int

    worker: Any = pyspark.worker
    send = getattr(worker, "send_accumulator_updates", None)
    if send is None or send.__module__ == __name__:
        return

    def send_and_end(results: BinaryIO) -> None:
        send(results)
        write_int(SpecialLengths.END_OF_DATA_SECTION, results)  # type: ignore[no-untyped-call]  # it has no annotations
        sys.exit(1)

    worker.send_accumulator_updates = send_and_end
