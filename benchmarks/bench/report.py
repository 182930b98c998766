"""The report of the measured rows: the table, the machine, and regressions."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.measure import Row, Side

_LIBRARIES = ("numpy", "keras", "tensorflow", "pyspark", "pyarrow")
_HEAD = ("section", "case", "of the limit", "target", "times the plain way", "target", "note", "processor")
#: Numbers that identify a processor if a virtual machine shortens its name.
_CPU_NUMBERS = {"cpu family": "family", "model": "model"}


def machine() -> dict[str, Any]:
    """Return a description of this machine, and its load from other programs."""
    versions = {}
    for library in _LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            versions[library] = "absent"
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        **versions,
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    values = {}
    for line in reversed(lines):
        name, _, value = line.partition(":")
        values[name.strip()] = value.strip()
    if "model name" not in values:
        return platform.processor() or platform.machine()
    numbers = [f"{word} {values[name]}" for name, word in _CPU_NUMBERS.items() if name in values]
    return f"{values['model name']} ({', '.join(numbers)})" if numbers else values["model name"]


def describe(machine: dict[str, Any]) -> str:
    """Return the machine in one line."""
    versions = ", ".join(f"{library} {machine[library]}" for library in ("python", *_LIBRARIES))
    load = " ".join(map(str, machine["load"]))
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {versions}; load before: {load} "
        "(1, 5, 15 minutes)"
    )


def save(path: Path, machine: dict[str, Any], rows: Iterable[Row]) -> None:
    """Write rows and machine as JSON."""
    content = {"machine": machine, "rows": [dataclasses.asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Return what `save` wrote; a row without a processor was measured on that of the file's machine."""
    content = json.loads(path.read_text())
    processor = content["machine"]["cpu"]
    return content["machine"], [Row(**({"processor": processor} | row)) for row in content["rows"]]


def table(rows: Sequence[Row]) -> str:
    """Return the ratios, in Markdown; those below their targets are bold."""
    lines = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(_HEAD))]
    texts = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    texts.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(texts)


def _cells(row: Row) -> tuple[str, ...]:
    compared = [text for side in row.sides.values() for text in (_ratio(side), _target(side.target))]
    return row.section, row.case, *compared, "; ".join(filter(None, [row.refused, row.note])), row.processor


def _ratio(side: Side) -> str:
    if side.ratio is None:
        return "–" if side.spread is None else "refused"
    text = _number(side.ratio) if side.spread is None else f"{_number(side.ratio)} ± {side.spread / 2:.0%}"
    return f"**{text}**, short" if side.short else text


def _target(target: float | None) -> str:
    return "–" if target is None else f"≥ {target:g}"


def _number(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"


def regressions(old: Iterable[Row], new: Iterable[Row]) -> list[str]:
    """Return a line for each ratio that fell by more than the sum of both measurements' spreads."""
    before = {(row.section, row.case): row for row in old}
    lines = []
    for row in new:
        was = before.get((row.section, row.case), row).sides
        for name, what in (("limit", "of the limit"), ("naive", "times the plain way")):
            (_, then, spread, _), (_, now, spread_now, _) = was[name], row.sides[name]
            if then is not None and now is not None and then - now > then * (spread or 0) + now * (spread_now or 0):
                lines.append(f"{row.section}: {row.case}: {_number(then)} → {_number(now)} {what}")
    return lines
