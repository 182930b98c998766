"""The parts of README and docs that are made from the code and from the figures in `docs/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from bench.measure import Row
from bench.report import describe, load, table
from matrix import command as matrix_command

from docsite.pictures import PICTURES

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "docs" / "bench.json"
MATRIX = ROOT / "docs" / "matrix.json"
PICTURE_FOLDER = ROOT / "docs" / "pictures"

#: The README's five rules, and why one would take each.
RULES = {
    "agn": "a good first choice: a window's movement is divided by its steps, whatever their number",
    "dynsgd": "workers of very different speed: a stale commit counts for less",
    "aeasgd": "workers that explore on their own, tied to the center by a spring",
    "dana_slim": "momentum with many asynchronous workers, at no cost at the server",
    "ssgd": "synchronous rounds, as a baseline",
}

#: The README's six figures: section and case in `docs/bench.json`, against what ("limit" or "naive"), and what it says.
FIGURES = (
    ("train", "M, 2 workers, AGN, window 10, batches of 128", "limit", "epoch of a whole job on Spark, against two "
     "processes that train without exchanging anything"),
    ("ps", "19.2 MB, 8 clients, downpour", "limit", "exchanges of 19.2 MB with 8 clients, against a bare "
     "server that only receives, checks, adds and sends"),
    ("ps", "0.473 MB, 64 clients, downpour", "limit", "exchanges of 0.5 MB with 64 clients, likewise"),
    ("data", "first pass, Parquet", "limit", "mini-batches from Parquet, against Spark's rows that nobody looks at"),
    ("predict", "S, 60000 rows", "limit", "distributed prediction, against `keras.Model.predict` on arrays"),
    ("safety", "ledger, history and finite check, M, 2 workers, AGN, window 10, batches of 128", "limit",
     "the same job with leases, ledger and checks, against without"),
)  # fmt: skip


def rules() -> str:
    """The README's short table of rules."""
    from distkeras.ps.rules import all_rules

    lines = ["| rule | paper | when |", "|---|---|---|"]
    for name, when in RULES.items():
        info = all_rules()[name].info
        lines.append(f"| [`{name}`](ps/rules/{name}.py) | {info.paper} | {when} |")
    return "\n".join(lines)


def figures() -> str:
    """The README's short table of the benchmark; "short" marks what is below what was wanted."""
    _, rows = load(BENCH)
    by_case = {(row.section, row.case): row for row in rows}
    lines = ["| what, against what | ratio | wanted | processor |", "|---|---|---|---|"]
    lines += [_figure(by_case[section, case], against, what) for section, case, against, what in FIGURES]
    return "\n".join(lines)


def _figure(row: Row, against: str, what: str) -> str:
    ratio, spread, target = (
        (row.ratio_to_limit, row.spread_to_limit, row.target_limit)
        if against == "limit"
        else (row.ratio_to_naive, row.spread_to_naive, row.target_naive)
    )
    if ratio is None or spread is None:
        raise ValueError(f"a figure of the README must be measured. Received: none for {row.section}: {row.case}")
    short = target is not None and ratio < target
    text = f"{ratio:.2f}\u00a0±\u00a0{spread / 2:.0%}"
    marked = f"**{text}**,\u00a0short" if short else text
    return f"| {what} | {marked} | {'–' if target is None else f'≥ {target:g}'} | {row.processor} |"


def benchmark() -> str:
    """The whole table of the benchmark, and the machine it was measured on."""
    machine, rows = load(BENCH)
    unbroken = table(rows).replace(" ± ", "\u00a0±\u00a0").replace(", short", ",\u00a0short")
    return f"{describe(machine)}\n\n{unbroken}"


def matrix() -> str:
    """The core of the tests under each version and backend."""
    return matrix_command.table(matrix_command.load(MATRIX))


#: File to the parts between its marks ``<!-- NAME: ... -->`` and ``<!-- end of NAME -->``.
PARTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"rules": rules, "figures": figures},
    "docs/performance.md": {"bench": benchmark},
    "docs/guide/versions.md": {"matrix": matrix},
}


def filled(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """``text`` with what is between its marks made anew.

    Raises:
        ValueError: a mark is missing.
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
    """Every generated file, or file with generated parts, with the content that it should have."""
    found = {PICTURE_FOLDER / name: draw().svg() for name, draw in PICTURES.items()}
    for name, parts in PARTS.items():
        found[ROOT / name] = filled((ROOT / name).read_text(), parts)
    return found
