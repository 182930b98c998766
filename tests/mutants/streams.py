"""Faults in streams, in the places of their files, and in what a job finds there."""

from __future__ import annotations

from mutants.mutant import Mutant

PLACES, ROWS = "ps/world/places.py", "distkeras/keras_model/stored_rows.py"
STREAM, HALVES, VERSIONS = (
    "distkeras/training/stream.py",
    "distkeras/training/stream_halves.py",
    "ps/checkpoint/versions.py",
)
_STREAM, _CALLBACKS = "tests/training/test_stream.py", "tests/training/test_stream_callbacks.py"
_ROWS, _VERSIONS = ("tests/keras_model/test_wide_embedding.py",), ("tests/training/test_stream_versions.py",)

STREAMS = (
    Mutant(
        "a path is relative until it is opened",
        "ps/checkpoint/store.py",
        'require_place("uri", uri, "a directory, or a URI")',
        "uri",
        "after a change of the working directory, a restarted server opens another checkpoint",
        ("tests/ps/test_places.py",),
    ),
    Mutant(
        "the rest of a URI after a # is dropped",
        PLACES,
        '    ignored = "#?" if place.startswith(_FILE) else "#"\n',
        '    ignored = ""\n',
        "two URIs name the same folder, and two jobs have the same checkpoint",
        ("tests/ps/test_places.py",),
    ),
    Mutant(
        "Spark's half has another folder than the checkpoint",
        "distkeras/spark/places.py",
        '    return f"file://{path}"\n',
        "    return Path(path).as_uri()\n",
        "a stream that begins again in an empty folder finds all rows done, and trains nothing",
        ("tests/spark/test_places.py",),
    ),
    Mutant(
        "a restarted server may have an older snapshot",
        STREAM,
        "        if covered_by(self._process.resumed) < self._query_state.done:\n",
        "        if False:\n",
        "a stream ends successfully with the center before its last micro-batch",
        (f"{_STREAM}::test_a_server_that_dies_between_two_micro_batches_is_restarted_to_end_the_stream",),
    ),
    Mutant(
        "a server that died is not restarted at the end",
        STREAM,
        "self._server.ask if self._failure is None else self._server.ask_once",
        "self._server.ask_once",
        "a stream ends without its model and its last version",
        (f"{_STREAM}::test_a_server_that_dies_between_two_micro_batches_is_restarted_to_end_the_stream",),
    ),
    Mutant(
        "the last version of a dead driver is forgotten",
        STREAM,
        "            if self._publisher is not None and process.resumed is not None and process.resumed.complete:\n",
        "            if self._publisher is not None and process.resumed is not None and False:\n",
        "no later micro-batch brings the version",
        (f"{_STREAM}::test_a_server_that_dies_between_two_micro_batches_is_restarted_to_end_the_stream",),
    ),
    Mutant(
        "a callback waits for its own stream",
        STREAM,
        "        return self._callbacks.calls_here() or threading.current_thread() is self._closing_thread\n",
        "        return False\n",
        "a stream that a callback stops ends with a DeadlineError",
        (f"{_CALLBACKS}::test_a_callback_may_call_every_method_of_its_stream",),
    ),
    Mutant(
        "a canceled micro-batch is a failure",
        STREAM,
        "                if not self._canceling.is_set():\n",
        "                if True:\n",
        "a stream that was stopped has an error",
        (f"{_STREAM}::test_a_stop_that_cancels_a_micro_batch_is_no_failure",),
    ),
    Mutant(
        "a version is published before its ledger is checked",
        STREAM,
        "        records = server.ask(lambda driver: JobRecords.drain_micro_batch(driver, *current))\n",
        "        records = server.ask(lambda driver: JobRecords.drain_micro_batch(driver, *current))\n"
        "        if self._publisher is not None:\n"
        "            self._publisher.end(*current, lambda: server.ask(plan.fetch_center))\n",
        "other processes predict with a center in which rows count twice",
        _VERSIONS,
    ),
    Mutant(
        "a mark on a version is trusted for too long",
        "ps/checkpoint/versions.py",
        "- HELD_SECONDS // 2",
        "- HELD_SECONDS",
        "the publisher deletes the version that a micro-batch has just begun with",
        ("tests/ps/checkpoint/test_versions.py",),
    ),
    Mutant(
        "the movements of a group are added in the order of arrival",
        "ps/protocol/companions.py",
        "sorted([own, *(other.commit for other in others)], key=lambda commit: commit.worker)",
        "[own, *(other.commit for other in others)]",
        "the same job has other sums",
        ("tests/ps/center/test_relay_groups.py",),
    ),
    Mutant(
        "reading rows makes their folder",
        ROWS,
        "open_files(saved.folder, create=False)",
        "open_files(saved.folder)",
        "an empty folder looks like one with rows",
        _ROWS,
    ),
    Mutant(
        "the bytes of rows are not compared",
        ROWS,
        '            if _checksum(data) != entry.get("checksum", _checksum(data)):\n',
        "            if False:\n",
        "a damaged file predicts with other rows",
        _ROWS,
    ),
    Mutant(
        "the list of rows is not compared",
        ROWS,
        "        if checksum is not None and _checksum(data) != checksum:\n",
        "        if False:\n",
        "a model predicts with another one's rows",
        _ROWS,
    ),
    Mutant(
        "rows are not marked as unfinished",
        ROWS,
        "    files.write(_LIST, [_UNFINISHED])\n",
        "    pass\n",
        "a model predicts with a part of its rows",
        _ROWS,
    ),
    Mutant(
        "the last snapshot may name older states",
        "ps/checkpoint/checkpointer.py",
        "not (closing and self._optimizer_files.behind(center.leases.states()))",
        "True",
        "a job that is resumed with more epochs begins with an old optimizer",
        ("tests/ps/checkpoint/test_optimizer_files.py",),
    ),
    Mutant(
        "columns that were assembled have no order",
        "distkeras/training/plan.py",
        "            if isinstance(given, list):\n",
        "            if False:\n",
        "a stream goes on with swapped columns",
        ("tests/ml/test_streaming.py::test_a_stream_does_not_go_on_with_its_columns_in_another_order",),
    ),
    Mutant(
        "a suspended server is a wrong network",
        "distkeras/training/cluster_server.py",
        '                if row["error"] and not row["unanswered"]:\n',
        '                if row["error"]:\n',
        "a healthy job ends because its server was suspended for a moment",
        ("tests/training/test_cluster_server.py",),
    ),
    Mutant(
        "rows that were not written to their end remain",
        ROWS,
        "            remove_folder(place)\n",
        "            pass\n",
        "a folder remains that no model refers to",
        _ROWS,
    ),
    Mutant(
        "two drivers write one file of groups' models",
        "distkeras/groups/store.py",
        'f"model-{manifest.model[:8]}.keras"',
        '"model-00000000.keras"',
        "a driver that has lost the folder replaces its successor's model, and no run can resume the job",
        ("tests/groups/test_store_faults.py",),
    ),
    Mutant(
        "a folder of groups that cannot be listed has an untyped error",
        "distkeras/groups/store.py",
        '    except OSError as error:\n        raise SnapshotError(f"the folder of the groups',
        '    except ZeroDivisionError as error:\n        raise SnapshotError(f"the folder of the groups',
        "the error of a disk does not say which folder it is about",
        ("tests/groups/test_store_faults.py",),
    ),
)
