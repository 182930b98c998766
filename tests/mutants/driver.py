"""Faults at the driver, in the order of rows, and in the results of a job."""

from __future__ import annotations

from mutants.mutant import Mutant

SOURCE, SUPERVISOR, TABLES = (
    "distkeras/data/source.py",
    "distkeras/training/supervisor.py",
    "distkeras/results.py",
)
_SOURCE, _SUPERVISOR, _TABLES = (
    ("tests/data/test_source.py", "tests/data/test_batches.py"),
    ("tests/training/test_supervisor.py",),
    ("tests/test_results.py",),
)

DRIVER = (
    Mutant(
        "other rows are trained on",
        SOURCE,
        "        if expected is not None and checksum != expected:",
        "        if expected is not None and found == -1:",
        "a task that is tried again skips rows that were never counted",
        _SOURCE,
    ),
    Mutant(
        "the end of an epoch is not marked",
        SOURCE,
        "            yield previous.batch(epoch, count - 1, True)",
        "            yield previous.batch(epoch, count - 1, False)",
        "the last window of an epoch is not committed",
        _SOURCE,
    ),
    Mutant(
        "a start beyond the data",
        SOURCE,
        "        if start > count:\n",
        "        if start > count + 10**9:\n",
        "an input that has shrunk counts as trained on",
        _SOURCE,
    ),
    Mutant(
        "rows are not spooled",
        SOURCE,
        "            rows = self._spool.append(rows)\n",
        "            self._spool.append(rows)\n",
        "arrays of Arrow are kept alive in addition to the spool",
        _SOURCE,
    ),
    Mutant(
        "steps are handed three elements",
        "distkeras/keras_model/compiled_steps.py",
        "    data = keras.utils.pack_x_y_sample_weight(x, labels, weight)",
        "    data = (x, labels, weight)",
        "a `train_step` that unpacks x and y fails",
        ("tests/keras_model/test_own_steps.py",),
    ),
    Mutant(
        "a frozen layer stays frozen",
        "distkeras/keras_model/trainable_flags.py",
        "        layer._trainable = bool(flag)",
        "        layer._trainable = layer._trainable and bool(flag)",
        "an inner model that is unfrozen after training does not train",
        ("tests/keras_model/test_trainable_flags.py",),
    ),
    Mutant(
        "every epoch has the same order",
        "distkeras/data/shuffling.py",
        "(spec.seed, worker, epoch) if block is None",
        "(spec.seed, worker, 0) if block is None",
        "shuffling is once for all epochs",
        ("tests/data/test_batches.py", "tests/data/test_source.py"),
    ),
    Mutant(
        "labels beyond the classes",
        "distkeras/data/columns.py",
        "bad = (values < 0) | (values >= classes)",
        "bad = (values < 0) | (values > classes)",
        "a label that is no class trains a loss of zero",
        ("tests/data/test_columns.py", "tests/data/test_source.py"),
    ),
    Mutant(
        "NaN in a feature",
        "distkeras/data/columns.py",
        "good = np.isfinite(values) if raw",
        "good = ~np.isinf(values) if raw",
        "one bad row costs the model",
        ("tests/data/test_columns.py",),
    ),
    Mutant(
        "a model comes with an infinity in its moving statistics",
        "distkeras/training/plan.py",
        "published = {*replica.layout.names, *replica.moving_statistics.names}",
        "published = {*replica.layout.names}",
        "the error names workers, although the caller's model is wrong",
        ("tests/training/test_plan.py",),
    ),
    Mutant(
        "a checksum of the last record only",
        "distkeras/data/ordering.py",
        "zlib.crc32(hashes[first:end].data, self._crc)",
        "zlib.crc32(hashes[first:end].data)",
        "rows that were exchanged before are not noticed",
        ("tests/data/test_source.py", "tests/data/test_batches.py"),
    ),
    Mutant(
        "a server that dies again and again is started forever",
        SUPERVISOR,
        "        if self._futile >= _MAX_FUTILE_RESTARTS:\n",
        "        if self._futile > 10**6:\n",
        "a job that cannot get on does not end",
        ("tests/scripts/test_simulate_faults.py::test_a_server_that_dies_again_and_again_is_given_up",),
    ),
    Mutant(
        "a restarted server forgets that the job ends early",
        SUPERVISOR,
        "            if reason is not None:\n",
        "            if not reason:\n",
        "a stop condition is met and nothing stops",
        _SUPERVISOR,
    ),
    Mutant(
        "a suspended server is waited for without a deadline",
        SUPERVISOR,
        "            if self._world.monotonic() > deadline:\n",
        "            if self._world.monotonic() > deadline + 10**6:\n",
        "a job with a checkpoint hangs",
        _SUPERVISOR,
    ),
    Mutant(
        "a connection that breaks ends the job",
        SUPERVISOR,
        "                if not self._lost(error):\n                    self.record_activity()\n"
        "                    raise\n",
        "                self.record_activity()\n                raise\n",
        "the driver's own connection costs the job",
        _SUPERVISOR,
    ),
    Mutant(
        "a mini-batch may be missing",
        TABLES,
        "                if not whole or (counted != expected and not short):",
        "                if not whole or counted > expected:",
        "a job that lost data returns a model",
        _TABLES,
    ),
    Mutant(
        "a mini-batch may be missing in the middle",
        TABLES,
        "np.array_equal(firsts[1:], lasts[:-1] + 1))",
        "len(firsts) == len(lasts))",
        "a job that lost data returns a model",
        _TABLES,
    ),
)
