"""Generate the parts of README and docs that come from the code and from the figures in `docs/`."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from bench.measure import Row
from bench.report import describe, load, table
from matrix import command as matrix_command
from tuning import cases as tuning

from docsite.declared import stub
from docsite.pictures import PICTURES

ROOT = Path(__file__).parents[2]
BENCH, MATRIX = (ROOT / "docs" / name for name in ("bench.json", "matrix.json"))
TUNING, DEFAULTS, MANY = (
    ROOT / "docs" / "tuning" / name for name in ("results.json", "defaults.json", "defaults_many.json")
)
PICTURE_FOLDER = ROOT / "docs" / "pictures"

#: What a module's docstring lists: a name, two spaces or more, what it is.
_LISTED = re.compile(r"^    (\w+) {2,}(\S.*)$", re.MULTILINE)

#: The README's five rules, and when to use each.
RULES = {
    "adag": "To begin with: the default. A movement counts less where others have moved the center far.",
    "dynsgd": "Workers differ much in speed. A stale commit counts for less.",
    "aeasgd": "Workers should explore independently. An elastic force pulls them toward the center.",
    "dana_slim": "Many asynchronous workers use momentum. The server does no extra work.",
    "ssgd": "A baseline in synchronous rounds is needed.",
}

#: The summary's figures: section and case in `docs/bench.json`, the side that it is compared with ("limit" or
#: "naive"), and the two sides, as "measurement, compared with reference".
FIGURES = (
    ("train", "M, 2 workers, AGN, window 10, batches of 128", "limit", "epoch of a whole job on Spark with 4.8 million "
     "parameters, compared with two processes that train without any exchange"),
    ("ps", "19.2 MB, 8 clients, downpour", "limit", "exchanges of 19.2 MB with 8 clients, compared with a "
     "bare server that only receives, checks, adds and sends"),
    ("ps", "0.473 MB, 64 clients, downpour", "limit", "exchanges of 0.5 MB with 64 clients, compared with the "
     "same bare server"),
    ("data", "first pass, Parquet", "limit", "mini-batches from Parquet, compared with Spark's rows when "
     "nothing reads them"),
    ("predict", "S, 60000 rows", "limit", "distributed prediction, compared with `keras.Model.predict` on "
     "arrays"),
    ("ps", "0.473 MB, 8 clients, downpour", "limit", "exchanges of 0.5 MB with 8 clients, compared with the same bare "
     "server"),
    ("ps", "19.2 MB, 8 clients, dana_dc", "limit", "exchanges of 19.2 MB with 8 clients under DANA-DC, compared with "
     "the same bare server"),
    ("step", "M, batches of 32, windows of 10", "limit", "steps of a medium model, compared with a bare compiled loop"),
    ("step", "S, batches of 32, windows of 10", "limit", "steps of a small model, compared with a bare compiled loop"),
    ("data", "first pass, Parquet", "naive", "mini-batches from Parquet, compared with `rdd.mapPartitions`"),
    ("data", "later epochs", "naive", "later passes over the rows, compared with the first pass"),
    ("train", "S, 2 workers, AGN, window 10, batches of 32", "naive", "epoch of a whole job with a small model, "
     "compared with the best `fit` on both cores"),
    ("train", "jax, S, 2 workers, AGN, window 10, batches of 32", "naive", "the same on JAX, compared with the best "
     "`fit` on both cores"),
    ("ps", "19.2 MB, 8 workers in 1 group", "naive", "windows of 8 workers in one relay group, "
     "compared with 8 workers without relays"),
    ("ps", "19.2 MB, 8 workers in 2 groups", "naive", "windows of 8 workers in two relay groups, "
     "compared with 8 workers without relays"),
    ("link", "19.2 MB exchange, int8, 1 Gbps", "naive", "exchanges in int8 at 1 Gbps, compared with float32"),
    ("shards", "loopback, 19.2 MB, two shards", "naive", "exchanges of 19.2 MB on one machine with two shards, "
     "compared with one server over its connection"),
    ("shards", "loopback, 19.2 MB, two shards, shared memory", "naive", "the same, compared with one server that "
     "shares memory with the worker, as it does there"),
    ("shards", "1 Gbit/s links, 100 MB, 2 shards", "naive", "exchanges of 100 MB with two shards, each with a link of "
     "1 Gbit/s, compared with one server"),
    ("shards", "1 Gbit/s links, 100 MB, 4 shards", "naive", "exchanges of 100 MB with four such shards, compared with "
     "one server"),
    ("start", "S, 3 epochs, DOWNPOUR, window 10, batches of 128, a session of `distkeras.spark`", "naive", "short "
     "whole job in a session of `distkeras.spark`, compared with elephas"),
    ("start", "cross-validation, 12 fits of S, 3 epochs, DOWNPOUR, window 10, batches of 128", "naive",
     "cross-validation with 12 fits, compared with elephas"),
)  # fmt: skip


def _table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown; the cells of ``head`` are separated as in its line."""
    lines = [f"| {head} |", f"|{'---|' * (head.count(' | ') + 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def rules() -> str:
    """Return the README's short table of rules."""
    from distkeras.ps.rules import all_rules

    def row(name: str, when: str) -> tuple[str, ...]:
        rule = all_rules()[name]
        file = rule.__module__.removeprefix("distkeras.").replace(".", "/")
        return f"[`{name}`]({file}.py)", rule.info.paper, when

    return _table("rule | paper | when to use it", (row(*each) for each in RULES.items()))


def figures() -> str:
    """Return a short table of the benchmark's `FIGURES`; a ratio below its target is in bold."""
    by_case = {(row.section, row.case): row for row in _rows()}
    head = "measurement | compared with | ratio | target | measured | reference | processor"
    return _table(head, (_figure(by_case[section, case], against, what) for section, case, against, what in FIGURES))


def _rows(section: str = "") -> list[Row]:
    """Return the rows of the benchmark, of one section or of all."""
    return [row for row in load(BENCH)[1] if row.section.startswith(section)]


def _figure(row: Row, against: str, what: str) -> tuple[str, ...]:
    side = row.sides[against]
    if side.ratio is None or side.spread is None or row.ours is None or side.rate is None:
        raise ValueError(f"a figure must be measured. Received: none for {row.section}: {row.case}")
    text = _ratio(side.ratio, side.spread)
    wanted = "–" if side.target is None else f"≥\u00a0{side.target:g}"
    measured, reference = (_measured(rate, row.unit) for rate in (row.ours, side.rate))
    ratio = f"**{text}**" if side.short else text
    return (*what.split(", compared with "), ratio, wanted, measured, reference, row.processor)


def _ratio(ratio: float, spread: float | None) -> str:
    return f"{ratio:.{2 if ratio < 10 else 1}f}\u00a0±\u00a0{(spread or 0) / 2:.0%}"


def _measured(rate: float, unit: str) -> str:
    """Return a rate with its unit; jobs per hour become the time of one job."""
    return _seconds(rate) if unit == "jobs/h" else f"{_rate(rate)}\u00a0{unit}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _seconds(jobs_an_hour: float) -> str:
    return f"{3600 / jobs_an_hour:.1f}\u00a0s"


def whole_jobs() -> str:
    """Return the table of whole jobs compared with plain Keras, with the times of both."""
    rows = []
    for row in _rows("start"):
        found, ratio = _BESIDE_KERAS.search(row.note), row.ratio_to_limit
        if found is not None and row.ours is not None and row.limit is not None:
            times = "refused: the rounds disagree" if ratio is None else f"{1 / ratio:.1f}"
            seconds = _seconds(row.ours), _seconds(row.limit)
            rows.append((row.case, *seconds, times, found["times"], found["ours"], found["keras"], row.processor))
    return _table(
        "job | distkeras | plain Keras | ratio of the times | ratio for the whole program | accuracy of distkeras | "
        "accuracy of plain Keras | processor",
        rows,
    )


def epochs() -> str:
    """Return the table of later epochs compared with `fit`, with the times of 60,000 rows."""
    rows = []
    for row in _rows("train"):
        if fit := re.search(r"naive: fit on (\w+)(?: with (steps_per_execution=\d+))?", row.note):
            if row.ratio_to_naive is None or row.ours is None or row.naive is None:
                raise ValueError(f"an epoch must be measured. Received: none for {row.case}")
            both = (row.ours, row.naive)
            rates, times = (f"{_rate(rate)} rows/s" for rate in both), (f"{_ROWS / rate:.1f}\u00a0s" for rate in both)
            which = f"{fit[1]}, `{fit[2]}`" if fit[2] else "tensorflow, one step a call"
            ratio = _ratio(row.ratio_to_naive, row.spread_to_naive)
            rows.append((row.case, ratio, *rates, which, *times, row.processor))
    return _table(
        "job | ratio | distkeras | `fit` | which `fit` | an epoch of distkeras | an epoch of `fit` | processor", rows
    )


def goodput() -> str:
    """Return the table of whole jobs under faults, next to the same jobs without faults.

    Raises:
        ValueError: the note of a job does not have the numbers.
    """
    rows = []
    for row in _rows("goodput"):
        faults, found = re.match(r"\d+ faults an hour", row.case), _GOODPUT.search(row.note)
        if faults is None or found is None or row.ratio_to_limit is None:
            raise ValueError(f"a job under faults must have its numbers in its note. Received: {row.case}: {row.note}")
        wrong, share = f"{found['lost']}, {found['doubled']}", f"{row.ratio_to_limit:.0%}"
        keras = f"{float(found['keras']):.0%}"
        rows.append((faults[0].split()[0], found["faults"], share, wrong, keras, row.processor))
    return _table(
        "faults an hour | faults | samples a second, of the undisturbed job's | mini-batches lost, counted twice | "
        "plain Keras with a checkpoint every 200 steps | processor",
        rows,
    )


def layers(package: str) -> str:
    """Return the folders of ``package`` in the order of imports, as a table, from its docstring."""
    rows = _LISTED.findall(inspect.getdoc(importlib.import_module(package)) or "")
    return _table(f"{package} | what it is", ((f"`{name}`", what) for name, what in rows))


def benchmark() -> str:
    """Return the whole benchmark, a table for each section, and the machine it was measured on."""
    machine, rows = load(BENCH)
    parts = [describe(machine)]
    for section in dict.fromkeys(row.section for row in rows):
        narrow = re.sub(r" +(?= \|)", "", table([row for row in rows if row.section == section]))
        narrow = re.sub(r"(?m)^\|[^|]*(?=\|)", "", narrow)  # the heading names the section
        parts += [f"## {section}", narrow.replace(" ± ", "\u00a0±\u00a0").replace(", short", ",\u00a0short")]
    return "\n\n".join(parts)


def matrix() -> str:
    """Return the table of the tests' core under each version and backend."""
    return matrix_command.table(matrix_command.load(MATRIX))


#: Rows of the data set of whole jobs.
_ROWS = 60_000
#: The accuracies and the time of the whole program, in the note of a job that is compared with plain Keras.
_BESIDE_KERAS = re.compile(
    r"limit: plain Keras;.*accuracies \(ours, limit, naive\) (?P<ours>[\d.]+), (?P<keras>[\d.]+), .*"
    r"in times of plain Keras' (?P<times>[\d.]+),"
)

#: What a job under faults lost, and what plain Keras kept, in its note.
_GOODPUT = re.compile(
    r"(?P<faults>\d+) faults struck, mini-batches lost (?P<lost>\d+), doubled (?P<doubled>\d+);.*"
    r"plain Keras with a checkpoint every 200 steps keeps "
    r"(?P<keras>[\d.]+)"
)


def defaults() -> str:
    """Return the table of what a model learns by `fit`, and under the default and other rules."""
    cases: dict[tuple[str, str, int], dict[tuple[str, int], float]] = {}
    for row in json.loads(DEFAULTS.read_text()):
        cases.setdefault((row["data"], row["optimizer"], row["epochs"]), {})[row["rule"], row["workers"]] = row["score"]
    columns = [(rule, n) for rule in ("default", "dynsgd", "agn") for n in (2, 4)]
    return _table(
        "data | optimizer | epochs | `fit` | default, 2 workers | 4 | `dynsgd`, 2 | 4 | `agn`, 2 | 4",
        (
            (*case, f"{scores['fit', 1]:.1f}", *(f"{scores[column] - scores['fit', 1]:+.1f}" for column in columns))
            for case, scores in cases.items()
        ),
    )


def many() -> str:
    """Return the table of what many workers learn under the default rule."""
    scores: dict[str, list[str]] = {}
    for row in json.loads(MANY.read_text()):
        scores.setdefault(row["data"], []).append(f"{row['score']:.1f}")
    return _table("data | 8 workers | 16 | 64", ((data, *found) for data, found in scores.items()))


def workers() -> str:
    """Return the table of the times until the target by number of workers."""
    results = json.loads(TUNING.read_text())
    times = {
        n: [tuning.best_time(results, n, tuning.WINDOW, 0.0, service)[0] for service in tuning.SERVICES]
        for n in tuning.WORKERS
    }
    first = times[tuning.WORKERS[0]]

    def cells(time: float, one: float) -> tuple[str, str]:
        return (f"{time:,.0f} steps", f"{one / time:.1f}") if math.isfinite(time) else ("never", "–")

    return _table(
        "workers | time, if an exchange takes no time | speedup | time, if an exchange keeps the server busy for the "
        "time of a step | speedup",
        (
            (n, *(cell for pair in zip(found, first, strict=True) for cell in cells(*pair)))
            for n, found in times.items()
        ),
    )


_LAYERS = {"layers-ps": "distkeras.ps", "layers-distkeras": "distkeras"}
#: File to the parts between its marks ``<!-- NAME: ... -->`` and ``<!-- end of NAME -->``.
PARTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"rules": rules, "goodput": goodput},
    "docs/architecture.md": {name: partial(layers, package) for name, package in _LAYERS.items()},
    "docs/performance.md": {"summary": figures},
    "docs/benchmark.md": {"bench": benchmark},
    "docs/guide/versions.md": {"matrix": matrix},
    "docs/guide/tuning.md": {"workers": workers},
    "docs/guide/choosing-a-rule.md": {"defaults": defaults, "many": many},
    "docs/guide/one-machine.md": {"whole-jobs": whole_jobs, "epochs": epochs},
}


def filled(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return ``text`` with the parts between its marks written again.

    Raises:
        ValueError: ``text`` does not have each mark exactly once.
    """
    for name, make in parts.items():
        begin, end = f"<!-- {name}: ", f"<!-- end of {name} -->"
        count = text.count(begin) if text.count(end) == 1 else 0
        if count != 1:
            raise ValueError(f"the text must have the marks of {name!r} once. Received: {count} times")
        head, _, rest = text.partition(begin)
        mark, _, rest = rest.partition("-->\n")
        text = f"{head}{begin}{mark}-->\n\n{make()}\n\n{end}{rest.partition(end)[2]}"
    return text


def files() -> dict[Path, str]:
    """Return every generated file, or file with generated parts, with the content that it should have."""
    found = {PICTURE_FOLDER / name: draw().svg() for name, draw in PICTURES.items()}
    found[ROOT / "distkeras" / "ml" / "declared.pyi"] = stub()
    for name, parts in PARTS.items():
        found[ROOT / name] = filled((ROOT / name).read_text(), parts)
    return found
