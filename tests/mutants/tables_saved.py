"""Faults in how the rows of tables are saved, and in what they are read back as."""

from __future__ import annotations

from mutants.mutant import Mutant

CHANGES, LISTS = "ps/center/table_changes.py", "ps/checkpoint/row_files.py"
WRITER, DIRECTORY = "ps/checkpoint/table_files.py", "ps/checkpoint/directory.py"
_TESTS = ("tests/ps/checkpoint/test_table_files.py",)
_DRAWN = ("tests/ps/checkpoint/test_table_sequences.py",)
_RUNNING = ("tests/ps/checkpoint/test_table_checkpointer.py",)

TABLES_SAVED = (
    Mutant(
        "a row that a commit changes is not set aside",
        CHANGES,
        "                self._aside.append((ids[unread], rows[unread]))\n",
        "",
        "a snapshot lacks rows that were changed while it was written",
        _TESTS,
    ),
    Mutant(
        "a row that was set aside is read as well",
        CHANGES,
        "                self._unread[ids] = False\n        self._changed[ids] = True\n",
        "        self._changed[ids] = True\n",
        "a snapshot has rows from after its clock",
        _DRAWN,
    ),
    Mutant(
        "rows of a snapshot that failed are forgotten",
        CHANGES,
        "            self._changed |= self._before\n",
        "",
        "after a full disk every later snapshot lacks these rows",
        _TESTS,
    ),
    Mutant(
        "rows that a failed snapshot had not read stay unread",
        CHANGES,
        "            self._unread[:] = False\n",
        "",
        "rows that have not changed count as changed",
        _TESTS,
    ),
    Mutant(
        "the changed rows that a snapshot begins with are not kept",
        CHANGES,
        "        np.copyto(self._before, self._changed)\n",
        "",
        "after a full disk the next snapshot has another one's rows",
        _TESTS,
    ),
    Mutant(
        "a failed snapshot of the center does not end that of its tables",
        "ps/checkpoint/checkpointer.py",
        "            self._table_files.end()\n",
        "            pass\n",
        "after a full disk, rows are set aside for a snapshot that nothing writes",
        _RUNNING,
        equivalent="the next snapshot ends it first, and only memory is taken until then",
    ),
    Mutant(
        "a range for a whole file is not part of the snapshot",
        WRITER,
        "                table.changes.include(start, stop)\n",
        "                pass\n",
        "a whole file has rows from after the snapshot's clock",
        _TESTS,
    ),
    Mutant(
        "whole files follow the rows that were set aside",
        WRITER,
        "        return [*whole, *outgoing.flush()]\n",
        "        return [*outgoing.flush(), *whole]\n",
        "a snapshot has rows from after its clock",
        _TESTS,
    ),
    Mutant(
        "whole files never take the place of the oldest ones",
        WRITER,
        "            if partial <= SHARE * table.array.nbytes or budget < 0:\n",
        "            if partial >= 0 or budget < 0:\n",
        "a long job's checkpoint fills the disk",
        _TESTS,
    ),
    Mutant(
        "rows whose file is damaged are not written again",
        WRITER,
        "                self._tables[file.table].changes.mark(file.start, file.stop)\n",
        "                pass\n",
        "all later snapshots have old rows",
        _TESTS,
    ),
    Mutant(
        "a full file is forgotten",
        WRITER,
        "        self._files.append(self._save(self._ids[: self._count], self._rows[: self._count]))\n",
        "        self._files[:] = [self._save(self._ids[: self._count], self._rows[: self._count])]\n",
        "of many changed rows, some are missing",
        ("tests/ps/checkpoint/test_table_files.py", "tests/ps/checkpoint/test_table_sequences.py"),
    ),
    Mutant(
        "the merged file has the first of a row's values",
        LISTS,
        "    return unique, np.concatenate([rows for _, rows in reversed(pieces)])[first]\n",
        "    return unique, np.concatenate([rows for _, rows in pieces])[first]\n",
        "old rows come back",
        _TESTS,
    ),
    Mutant(
        "the merged file has rows that a whole file has replaced",
        LISTS,
        "            stays &= (ids < later.start) | (ids >= later.stop)\n",
        "            pass\n",
        "old rows come back",
        _TESTS,
    ),
    Mutant(
        "a gap between whole files goes unnoticed",
        LISTS,
        "        if first > start:\n            break\n",
        "",
        "files are dropped that have the only copy of a row",
        _TESTS,
    ),
    Mutant(
        "files of tables are never removed",
        DIRECTORY,
        '_NEEDED = ("log", "optimizer", "table")',
        '_NEEDED = ("log", "optimizer")',
        "a long job's checkpoint fills the disk",
        _TESTS,
    ),
    Mutant(
        "files with rows that a kept snapshot needs are removed",
        DIRECTORY,
        "*optimizers.values(), *(file.name for file in rows)))",
        "*optimizers.values()))",
        "no snapshot can be read",
        _TESTS,
    ),
    Mutant(
        "only some of the files with rows are read",
        DIRECTORY,
        "        for file in files:\n            _, arrays",
        "        for file in files[:-1]:\n            _, arrays",
        "a restarted server goes on from old rows",
        _TESTS,
    ),
    Mutant(
        "the rows of a snapshot are not given to the center",
        "ps/checkpoint/snapshot.py",
        "        table.array = rows\n",
        "        pass\n",
        "a restarted server's tables are zero",
        _TESTS,
    ),
    Mutant(
        "another job's tables",
        "ps/checkpoint/snapshot.py",
        "    if saved != expected:\n",
        "    if not expected and saved:\n",
        "a job goes on with tables of another size",
        _TESTS,
    ),
)
