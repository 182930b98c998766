"""The Markdown report. Every figure in it comes from the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reproduction.claims import SCALES, Claim, Scale
from reproduction.parts import VERDICTS, Check, Figure, Section, Table
from reproduction.spreads import listed

FRAME = (
    "This page reports claims of five papers (sections 1 to 10), and of papers from 2022 on (sections 11 to 13), that "
    "were tested at small scale. The tests use the simulator of the "
    "parameter server with a virtual clock and the server's own update rules. They train a perceptron (784-32-10, "
    "ReLU, softmax cross-entropy, mini-batches of 32) on Fashion-MNIST, or minimize Beale's function. The papers "
    "trained larger networks on other data for longer. Comparable are the order of the rules, which of them diverge, "
    "and by how much they differ, but not the accuracies themselves."
)
HONESTY = {
    "first": "The **first** criteria were written down before the first run and have not been changed since. "
    "Afterwards, grids of learning rates (compensation, ormo, throughput, daso) were extended or moved beyond an edge "
    "at which best rates lay. One of them was SSGDm's grid, whose rates had been too high for it to train at all. The "
    "runs at a quarter of the rate (momentum) were added, and do not count for any criterion. “(edge)” marks a rate "
    "that is still the first or the last of its grid, so that a better one may lie outside.",
    "revised": "The **revised** criteria complement those first criteria that cannot decide: nothing trained at the "
    "rate that all rules shared, a control was missing, or the required difference is as large as the difference "
    "between seeds. They were written after the first figures had been seen, and rates were tried with seeds 0 and 1. "
    "The seeds of the middle scale, which they are tested with, had not been used in any run. Five or six seeds left "
    "most criteria of momentum and ormo undecided, and some of elastic, throughput and daso. These were then run with "
    "ten seeds and the same criteria, with wider grids for momentum (and, after its first figures, for efficiency).",
}
INTERVALS = (
    "Each revised criterion, and each criterion of communication, slow-worker and many-workers, is about a difference "
    "taken seed by seed, because runs with the same seed begin alike and draw the same mini-batches. It holds if the "
    "95 % interval of the mean difference, by Student's t distribution, lies on the right side of the limit. It fails "
    "if the interval lies on the other side, and is undecided if the interval contains the limit. Such a difference is "
    "written as mean [lower, upper]."
)
FILES = {"first": "results.json", "revised": "revised.json"}
WRITTEN = {"first": "criteria as first written", "revised": "revised ones"}
TITLES = {"first": "First criteria", "revised": "Revised criteria"}


@dataclass(frozen=True)
class Part:
    """A claim with its sections; a section is None if it was not run.

    Args:
        claim: the claim.
        first: by the first criteria.
        revised: by the revised ones.
        has_revised: whether there are any.
    """

    claim: Claim
    first: Section | None
    revised: Section | None
    has_revised: bool

    def section(self, kind: str) -> Section | None:
        """Return the section by the criteria "first" or "revised"."""
        return self.first if kind == "first" else self.revised


@dataclass(frozen=True)
class Findings:
    """All contents of the report.

    Args:
        parts: one for each claim.
        scales: of each set of criteria that was run.
        seconds: the measured processor time, by set and claim.
        cost: the estimated cost of another scale, from `cost.measure`; empty if it was not measured.
    """

    parts: Sequence[Part]
    scales: Mapping[str, Scale]
    seconds: Mapping[str, Mapping[str, float]]
    cost: Mapping[str, Any]

    def checks(self, kind: str) -> list[tuple[Part, Check]]:
        """Return the checks of all criteria of a set that were run."""
        sections = [(part, part.section(kind)) for part in self.parts]
        return [(part, check) for part, section in sections if section is not None for check in section.checks]


def verdict(section: Section) -> str:
    """Return the number of criteria that are met, in words."""
    verdicts = [check.holds for check in section.checks]
    met, undecided = verdicts.count(True), verdicts.count(None)
    if met == len(verdicts):
        return "reproduced"
    beside = f", {undecided} undecided" if undecided else ""
    if met:
        return f"reproduced in part ({met} of {len(verdicts)} criteria{beside})"
    return f"not reproduced ({undecided} of {len(verdicts)} undecided)" if undecided else "not reproduced"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def count(checks: Sequence[Check]) -> str:
    """Return a count such as "3 of 5, 1 undecided"."""
    verdicts = [check.holds for check in checks]
    undecided = f", {verdicts.count(None)} undecided" if None in verdicts else ""
    return f"{verdicts.count(True)} of {len(verdicts)}{undecided}"


def headline(found: Findings) -> str:
    """Return the sentence that is also in the README."""
    texts = []
    for kind in found.scales:
        checks = [check for _, check in found.checks(kind)]
        met, undecided = sum(check.holds is True for check in checks), sum(check.holds is None for check in checks)
        beside = f" ({undecided} undecided)" if undecided else ""
        texts.append(f"{met} of {len(checks)} {WRITTEN[kind]} are met{beside}")
    return f"{'; '.join(texts)}."


def report(found: Findings, chosen: str) -> str:
    """Return the whole text; ``chosen`` has the options that selected claims."""
    kinds = list(found.scales)
    commands = [
        f"`python benchmarks/reproduction --scale {scale.name} --criteria {kind}{chosen}`"
        for kind, scale in found.scales.items()
    ]
    claims = [
        (f"[{part.claim.title}](#{part.claim.name})", *(_summary(part, kind) for kind in kinds)) for part in found.parts
    ]
    lines = [
        "# Reproduction of the papers' claims",
        FRAME,
        *(HONESTY[kind] for kind in kinds),
        INTERVALS,
        f"Made by {' and '.join(commands)}; do not edit. The figures are in "
        f"{' and '.join(f'[{FILES[kind]}]({FILES[kind]})' for kind in kinds)}. Spreads are mean ± standard deviation "
        "over the seeds.",
        headline(found),
        table(("claim", *(f"{TITLES[kind].lower()}, met ({found.scales[kind].name} scale)" for kind in kinds)), claims),
        *_cost(found),
        "## What does not reproduce at this scale",
        _failures(found),
    ]
    for number, part in enumerate(found.parts, 1):
        lines += _claim(number, part, found.scales)
    return "\n\n".join(lines) + "\n"


def _summary(part: Part, kind: str) -> str:
    section = part.section(kind)
    if section is not None:
        return count(section.checks)
    return "not run at this scale" if kind == "first" or part.has_revised else "none: the first decide"


def _cost(found: Findings) -> list[str]:
    texts = []
    for kind, seconds in found.seconds.items():
        complete = all(part.claim.name in seconds for part in found.parts if part.section(kind) is not None)
        texts.append(
            f"The {found.scales[kind].name} scale of the {kind} criteria took {sum(seconds.values()) / 60:.0f} minutes "
            f"of one core ({listed([f'{name} {value / 60:.1f}' for name, value in seconds.items()])}"
            + ("" if complete else "; the others were not measured")
            + ")."
        )
    if found.cost:
        hours, name = found.cost["hours"], found.cost["scale"]
        missing = [part.claim.name for part in found.parts if part.claim.name not in hours]
        without = f" (all claims but {listed(missing)})" if missing else ""
        most = sorted(hours, key=hours.__getitem__, reverse=True)[:3]
        texts.append(
            f"The {name} scale of the first criteria{without} was not run. Measured on a part "
            f"({found.cost['measured']} of its {found.cost['jobs']} jobs, each over a sixteenth of its length), it "
            f"would take {sum(hours.values()):.1f} hours of one core, most of them for "
            f"{listed([f'{claim} ({hours[claim]:.1f})' for claim in most])}."
        )
        if "revised" in found.seconds and found.scales["revised"].name != name:
            longer = SCALES[name].length / found.scales["revised"].length
            texts.append(
                f"That of the revised criteria has runs {longer:g} times as long as the {found.scales['revised'].name} "
                f"one: about {longer * sum(found.seconds['revised'].values()) / 3600:.1f} hours."
            )
    return ["## What it takes", " ".join(texts)] if texts else []


def _failures(found: Findings) -> str:
    rows = [
        (f"[{part.claim.name}](#{part.claim.name})", kind, check.criterion, check.here, VERDICTS[check.holds])
        for kind in found.scales
        for part, check in found.checks(kind)
        if check.holds is not True
    ]
    if not rows:
        return "Nothing: all criteria are met."
    return table(("claim", "criteria", "criterion", "here", "met"), rows)


def _claim(number: int, part: Part, scales: Mapping[str, Scale]) -> list[str]:
    claim = part.claim
    lines = [f'<a id="{claim.name}"></a>\n\n## {number}. {claim.title}', f"{claim.says} *{claim.source}*"]
    for kind, scale in scales.items():
        section = part.section(kind)
        if section is not None:
            lines += [
                f"**{TITLES[kind]}, {scale.name} scale: {verdict(section)}.**",
                _criteria(section, part.first if kind == "revised" else None),
                f"Setting: {section.setting}",
                *(_block(block) for block in section.blocks),
            ]
        elif kind == "revised" and part.has_revised:
            lines.append(f"**{TITLES[kind]}: not run at the {scale.name} scale.**")
    return lines


def _criteria(section: Section, first: Section | None) -> str:
    """Return the numbered table of criteria; with ``first``, a row also has the verdict of the first criterion."""
    rows = []
    for number, check in enumerate(section.checks, 1):
        row = [str(number), check.criterion, check.paper, check.here, VERDICTS[check.holds]]
        if first is not None:
            row.append(f"{check.first}: {VERDICTS[first.checks[check.first - 1].holds]}" if check.first else "–")
        rows.append(row)
    header = ["", "criterion", "paper", "here", "met"]
    return table([*header, "first criterion"] if first is not None else header, rows)


def _block(block: Table | Figure | str) -> str:
    if isinstance(block, Table):
        return f"{block.title}:\n\n{table(block.header, block.rows)}"
    if isinstance(block, Figure):
        return f"![{block.caption}]({block.file})\n\n*{block.caption}*"
    return block
