"""The catalog of planted faults: files of text in `faults`, in which a fault looks like a diff.

    file ps/center/leases.py
    tests tests/ps/center

    any attempt may commit: an attempt that Spark gave up and its successor both count
    -if lease is None or lease.attempt != attempt:
    +if lease is None:

The lines ``file`` and ``tests`` apply to the faults after them; faults without tests are for the simulation alone. A
line that begins with ``=`` says why the replacement changes no behavior. `python tests/mutants` runs the tests with
each fault, and `python tests/simulation --planted NAME` simulates jobs with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """A small replacement that makes the program wrong.

    Args:
        name: what the fault does, in words; unique.
        file: path of the changed file, relative to the repository's root.
        old: the text that is replaced; it occurs in the file exactly once.
        new: the text in its place.
        why: the consequence of the fault.
        tests: test files, or tests, that should find it; slow tests run only if one is named by itself.
        equivalent: why the replacement changes no behavior; empty if it does.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]
    equivalent: str = ""

    def applied(self, root: Path) -> str:
        """Return the text of the file with the fault.

        Raises:
            ValueError: ``old`` does not occur exactly once, because the sources have changed.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1 or self.old == self.new:
            raise ValueError(f"{self.name}: `old` must occur once in {self.file}. Received: {count} times")
        return text.replace(self.old, self.new)


def faults_in(text: str) -> Iterator[Mutant]:
    """Yield the faults that a file of the catalog lists."""
    file, tests = "", tuple[str, ...]()
    for block in text.split("\n\n"):
        head, *lines = block.strip("\n").split("\n")
        marked = {mark: "\n".join(line[1:] for line in lines if line[:1] == mark) for mark in "=-+"}
        if marked["-"]:
            name, _, why = head.partition(": ")
            yield Mutant(name, file, marked["-"], marked["+"], why, tests, marked["="].strip())
        for line in (head, *lines):
            kind, _, value = line.partition(" ")
            file = value if kind == "file" else file
            tests = tuple(value.split()) if kind == "tests" else tests


FAULTS = tuple(
    fault
    for path in sorted(Path(__file__).with_name("faults").glob("*.txt"))
    for fault in faults_in(path.read_text(encoding="utf-8"))
)
#: The faults that tests find; the simulation of whole jobs finds the others.
MUTANTS = tuple(fault for fault in FAULTS if fault.tests)
