"""Generate the parts of README and docs that come from the code and from the figures in `docs/`."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from bench.measure import Row
from bench.report import describe, load, table
from matrix import command as matrix_command
from tuning import cases as tuning

from docsite.declared import stub
from docsite.pictures import PICTURES

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "docs" / "bench.json"
MATRIX = ROOT / "docs" / "matrix.json"
TUNING = ROOT / "docs" / "tuning" / "results.json"
DEFAULTS = ROOT / "docs" / "tuning" / "defaults.json"
MANY = ROOT / "docs" / "tuning" / "defaults_many.json"
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

#: The summary's first figures: section and case in `docs/bench.json`, the side that it is compared with ("limit" or
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
)  # fmt: skip

#: What the summary of the page on performance has in addition.
FURTHER_FIGURES = (
    ("ps", "0.473 MB, 8 clients, downpour", "limit", "exchanges of 0.5 MB with 8 clients, compared with the same bare "
     "server"),
    ("ps", "19.2 MB, 8 clients, dana_dc", "limit", "exchanges of 19.2 MB with 8 clients under DANA-DC, compared with "
     "the same bare server"),
    ("step", "M, batches of 32, windows of 10", "limit", "steps of a medium model, compared with a bare compiled loop"),
    ("step", "S, batches of 32, windows of 10", "limit", "steps of a small model, compared with a bare compiled loop"),
    ("data", "first pass, Parquet", "naive", "mini-batches from Parquet, compared with `rdd.mapPartitions`"),
    ("data", "later epochs", "naive", "later passes over the rows, compared with the first pass"),
    ("train", "S, 2 workers, AGN, window 10, batches of 32", "naive", "epoch of a whole job with a small model, "
     "compared with `fit` with `steps_per_execution=1` on both cores"),
    ("ps", "19.2 MB, 8 workers in 1 group", "naive", "windows of 8 workers in one relay group, "
     "compared with 8 workers without relays"),
    ("ps", "19.2 MB, 8 workers in 2 groups", "naive", "windows of 8 workers in two relay groups, "
     "compared with 8 workers without relays"),
    ("link", "19.2 MB exchange, int8, 1 Gbps", "naive", "exchanges in int8 at 1 Gbps, compared with float32"),
    ("start", "S, 3 epochs, DOWNPOUR, window 10, batches of 128, a session of `distkeras.spark`", "naive", "short "
     "whole job in a session of `distkeras.spark`, compared with elephas"),
    ("start", "cross-validation, 12 fits of S, 3 epochs, DOWNPOUR, window 10, batches of 128", "naive",
     "cross-validation with 12 fits, compared with elephas"),
)  # fmt: skip


def rules() -> str:
    """Return the README's short table of rules."""
    from distkeras.ps.rules import all_rules

    lines = ["| rule | paper | when to use it |", "|---|---|---|"]
    for name, when in RULES.items():
        rule = all_rules()[name]
        file = rule.__module__.removeprefix("distkeras.").replace(".", "/")
        lines.append(f"| [`{name}`]({file}.py) | {rule.info.paper} | {when} |")
    return "\n".join(lines)


def figures(chosen: Iterable[tuple[str, str, str, str]] = FIGURES) -> str:
    """Return a short table of the benchmark's ``chosen`` figures; a ratio below its target is in bold."""
    _, rows = load(BENCH)
    by_case = {(row.section, row.case): row for row in rows}
    lines = [
        "| measurement | compared with | ratio | target | measured | reference | processor |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_figure(by_case[section, case], against, what) for section, case, against, what in chosen]
    return "\n".join(lines)


def _figure(row: Row, against: str, what: str) -> str:
    ratio, spread, target, other = (
        (row.ratio_to_limit, row.spread_to_limit, row.target_limit, row.limit)
        if against == "limit"
        else (row.ratio_to_naive, row.spread_to_naive, row.target_naive, row.naive)
    )
    if ratio is None or spread is None or row.ours is None or other is None:
        raise ValueError(f"a figure must be measured. Received: none for {row.section}: {row.case}")
    short = target is not None and ratio < target
    text = _ratio(ratio, spread)
    marked = f"**{text}**" if short else text
    wanted = "–" if target is None else f"≥\u00a0{target:g}"
    measured, reference = (_measured(rate, row.unit) for rate in (row.ours, other))
    cells = (*what.split(", compared with "), marked, wanted, measured, reference, row.processor)
    return f"| {' | '.join(cells)} |"


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
    lines = [
        "| job | distkeras | plain Keras | ratio of the times | ratio for the whole program | accuracy of distkeras | "
        "accuracy of plain Keras | processor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in load(BENCH)[1]:
        found = _BESIDE_KERAS.search(row.note)
        ratio, ours, keras = row.ratio_to_limit, row.ours, row.limit
        if row.section == "start" and found is not None and ours is not None and keras is not None:
            times = "refused: the rounds disagree" if ratio is None else f"{1 / ratio:.1f}"
            lines.append(
                f"| {row.case} | {_seconds(ours)} | {_seconds(keras)} | {times} | {found['times']} | "
                f"{found['ours']} | {found['keras']} | {row.processor} |"
            )
    return "\n".join(lines)


def epochs() -> str:
    """Return the table of later epochs compared with `fit`, one step a call, with the times of 60,000 rows."""
    lines = [
        "| job | ratio | distkeras | `fit`, one step a call | an epoch of distkeras | an epoch of `fit` | processor |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in load(BENCH)[1]:
        if row.section == "train" and "naive: fit on both cores" in row.note:
            ratio, ours, fit = row.ratio_to_naive, row.ours, row.naive
            if ratio is None or ours is None or fit is None:
                raise ValueError(f"an epoch must be measured. Received: none for {row.case}")
            lines.append(
                f"| {row.case} | {_ratio(ratio, row.spread_to_naive)} | {_rate(ours)} rows/s | "
                f"{_rate(fit)} rows/s | {_ROWS / ours:.1f}\u00a0s | {_ROWS / fit:.1f}\u00a0s | {row.processor} |"
            )
    return "\n".join(lines)


def goodput() -> str:
    """Return the table of whole jobs under faults, next to the same jobs without faults.

    Raises:
        ValueError: the note of a job does not have the numbers.
    """
    lines = [
        "| faults an hour | faults | samples a second, of the undisturbed job's | mini-batches lost, counted twice | "
        "plain Keras with a checkpoint every 200 steps | processor |",
        "|---|---|---|---|---|---|",
    ]
    for row in load(BENCH)[1]:
        if row.section == "goodput":
            faults, found = re.match(r"\d+ faults an hour", row.case), _GOODPUT.search(row.note)
            if faults is None or found is None or row.ratio_to_limit is None:
                raise ValueError(
                    f"a job under faults must have its numbers in its note. Received: {row.case}: {row.note}"
                )
            lines.append(
                f"| {faults[0].split()[0]} | {found['faults']} | {row.ratio_to_limit:.0%} | "
                f"{found['lost']}, {found['doubled']} | {float(found['keras']):.0%} | {row.processor} |"
            )
    return "\n".join(lines)


def layers(package: str) -> str:
    """Return the folders of ``package`` in the order of imports, as a table, from its docstring."""
    rows = _LISTED.findall(inspect.getdoc(importlib.import_module(package)) or "")
    lines = [f"| {package} | what it is |", "|---|---|", *(f"| `{name}` | {what} |" for name, what in rows)]
    return "\n".join(lines)


def layers_of(package: str) -> Callable[[], str]:
    """Return what makes the table of the folders of ``package``, in the order of imports."""
    return lambda: layers(package)


def summary() -> str:
    """Return the table of the page on performance: `FIGURES` and `FURTHER_FIGURES`."""
    return figures((*FIGURES, *FURTHER_FIGURES))


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
    lines = [
        "| data | optimizer | epochs | `fit` | default, 2 workers | 4 | `dynsgd`, 2 | 4 | `agn`, 2 | 4 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    cells: dict[tuple[str, str, int], dict[tuple[str, int], float]] = {}
    for row in json.loads(DEFAULTS.read_text()):
        cells.setdefault((row["data"], row["optimizer"], row["epochs"]), {})[row["rule"], row["workers"]] = row["score"]
    for case, scores in cells.items():
        fit = scores["fit", 1]
        others = (scores[rule, n] - fit for rule in ("default", "dynsgd", "agn") for n in (2, 4))
        lines.append(f"| {' | '.join(map(str, case))} | {fit:.1f} | {' | '.join(f'{each:+.1f}' for each in others)} |")
    return "\n".join(lines)


def many() -> str:
    """Return the table of what many workers learn under the default rule."""
    lines = ["| data | 8 workers | 16 | 64 |", "|---|---|---|---|"]
    rows = json.loads(MANY.read_text())
    for data in dict.fromkeys(row["data"] for row in rows):
        scores = [f"{row['score']:.1f}" for row in rows if row["data"] == data]
        lines.append(f"| {data} | {' | '.join(scores)} |")
    return "\n".join(lines)


def workers() -> str:
    """Return the table of the times until the target by number of workers."""
    results = json.loads(TUNING.read_text())
    lines = [
        "| workers | time, if an exchange takes no time | speedup | time, if an exchange keeps the server busy for the "
        "time of a step | speedup |",
        "|---|---|---|---|---|",
    ]
    first: list[float] = []
    for n in tuning.WORKERS:
        times = [tuning.best_time(results, n, tuning.WINDOW, 0.0, service)[0] for service in tuning.SERVICES]
        first = first or times
        cells = [
            f"{time:,.0f} steps | {one / time:.1f}" if math.isfinite(time) else "never | –"
            for one, time in zip(first, times, strict=True)
        ]
        lines.append(f"| {n} | {' | '.join(cells)} |")
    return "\n".join(lines)


#: File to the parts between its marks ``<!-- NAME: ... -->`` and ``<!-- end of NAME -->``.
PARTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"rules": rules, "goodput": goodput},
    "docs/architecture.md": {"layers-ps": layers_of("distkeras.ps"), "layers-distkeras": layers_of("distkeras")},
    "docs/performance.md": {"summary": summary},
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
