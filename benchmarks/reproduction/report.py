"""The Markdown report. Every figure in it comes from the results, but for the claims in `EARLIER`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reproduction.claims import VERDICTS, Check, Claim, Count, Figure, Scale, Section, Table
from reproduction.spreads import listed

FIGURES = "results.json"
FRAME = (
    "This page reports claims of papers that were tested at small scale. The tests use the simulator of the "
    "parameter server with a virtual clock and the server's own update rules. They train a perceptron (784-32-10, "
    "ReLU, softmax cross-entropy, mini-batches of 32) on Fashion-MNIST. The papers "
    "trained larger networks on other data for longer. Comparable are the order of the rules, which of them diverge, "
    "and by how much they differ, but not the accuracies themselves."
)
CRITERIA = (
    "Criteria **as first written** were written down before the first run and have not been changed since. “(edge)” "
    "marks a rate that is the first or the last of its grid, so that a better one may lie outside. **Revised** "
    "criteria replace first ones that cannot decide: nothing trained at the rate that all rules shared, a control was "
    "missing, or the required difference is as large as the difference between seeds. They were written after the "
    "first figures had been seen, and rates were tried with seeds 0 and 1. Seeds from 11 on, which they are tested "
    "with, had not been used in any run. Five or six seeds left most of them undecided; these were then run with ten "
    "seeds and the same criteria, and those of momentum with wider grids."
)
INTERVALS = (
    "Each revised criterion, and each criterion of communication, slow-worker and many-workers, is about a difference "
    "taken seed by seed, because runs with the same seed begin alike and draw the same mini-batches. It holds if the "
    "95 % interval of the mean difference, by Student's t distribution, lies on the right side of the limit. It fails "
    "if the interval lies on the other side, and is undecided if the interval contains the limit. Such a difference is "
    "written as mean [lower, upper]."
)
BEFORE = (
    "Verdicts with a star were measured before version 0.3.0: the programs, criteria and figures are in that release, "
    "and the counts here are copied from its report. They include all first criteria that revised ones have replaced, "
    "and are not in the list of what does not reproduce."
)


class Earlier(NamedTuple):
    """A claim whose program is only in release 0.3.0, the verdicts, and what was found, in a sentence."""

    claim: str
    source: str
    first: Count
    revised: Count
    found: str


EARLIER = (
    Earlier("Mean staleness is n − 1", "Hermans 2017", Count(5, 6), Count(),
            "It is, for any speeds. It is distributed geometrically only with memoryless workers."),
    Earlier("DynSGD: dividing by the staleness stabilizes", "Hermans 2017", Count(1, 3), Count(1, 1),
            "DynSGD trains with 20 workers where DOWNPOUR diverges, and loses accuracy with windows of 10."),
    Earlier("Elastic averaging reaches an equilibrium, which early stopping uses", "Hermans 2017", Count(2, 4),
            Count(1, 3, 1), "It does, but a plain window that exchanges as often gains nearly as much as early "
            "stopping. Whether AEASGD gains from longer windows is undecided."),
    Earlier("AGN is temporally more efficient than AEASGD", "Hermans 2017", Count(0, 2), Count(0, 2),
            "Over the time of training, AEASGD was ahead of AGN in 4 of 5 settings."),
    Earlier("Delay compensation makes ASGD as good as sequential SGD", "Zheng et al. 2017", Count(0, 3),
            Count(2, 3, 1),
            "DC-ASGD was more accurate than ASGD only at a rate that is too high for ASGD. At their own rates no "
            "difference was found with 32 workers."),
    Earlier("DASO takes less time than blocking synchronization at the same accuracy", "Coquelin et al. 2022",
            Count(4, 4), Count(2, 2), "It does; with more nodes it loses more accuracy than blocking does."),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A claim with its section."""

    claim: Claim
    section: Section

    def count(self, revised: bool) -> Count:
        """Return the verdicts of the criteria as first written, or of the ``revised`` ones."""
        return count([check for check in self.section.checks if check.revised == revised])


@dataclass(frozen=True)
class Findings:
    """All contents of the report, with the measured processor time by claim."""

    parts: Sequence[Part]
    scale: Scale
    seconds: Mapping[str, float]


def count(checks: Sequence[Check]) -> Count:
    """Return the verdicts of some criteria."""
    verdicts = [check.holds for check in checks]
    return Count(verdicts.count(True), len(verdicts), verdicts.count(None))


def verdict(section: Section) -> str:
    """Return the number of criteria that are met, in words."""
    found = count(section.checks)
    if found.met == found.all:
        return "reproduced"
    beside = f", {found.undecided} undecided" if found.undecided else ""
    if found.met:
        return f"reproduced in part ({found.met} of {found.all} criteria{beside})"
    return f"not reproduced ({found.undecided} of {found.all} undecided)" if found.undecided else "not reproduced"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def headline(found: Findings, earlier: Sequence[Earlier]) -> str:
    """Return the sentence that is also in the README, about the criteria of all claims."""
    first = [total for part in found.parts for total in (part.claim.before, part.count(False))]
    revised = [part.count(True) for part in found.parts]
    totals = {
        "criteria as first written": sum((*first, *(one.first for one in earlier)), Count()),
        "revised ones": sum((*revised, *(one.revised for one in earlier)), Count()),
    }
    texts = [
        f"{total.met} of {total.all} {name} are met" + (f" ({total.undecided} undecided)" if total.undecided else "")
        for name, total in totals.items()
        if total.all
    ]
    return f"{'; '.join(texts)}."


def report(found: Findings, chosen: str) -> str:
    """Return the whole text; ``chosen`` has the options that selected claims, without which it has all claims."""
    earlier = () if chosen else EARLIER
    lines = [
        "# Reproduction of the papers' claims",
        FRAME,
        CRITERIA,
        INTERVALS,
        f"Made by `python benchmarks/reproduction --scale {found.scale.name}{chosen}`; do not edit. The figures are in "
        f"[{FIGURES}]({FIGURES}). Spreads are mean ± standard deviation over the seeds.",
        headline(found, earlier),
        table(
            ("claim", "criteria as first written, met", "revised criteria, met"),
            [_summary(part) for part in found.parts],
        ),
        BEFORE,
        *_earlier(earlier),
        *_cost(found),
        "## What does not reproduce at this scale",
        _failures(found),
    ]
    for number, part in enumerate(found.parts, 1):
        lines += _claim(number, part)
    return "\n\n".join(lines) + "\n"


def _summary(part: Part) -> tuple[str, str, str]:
    kept, before, revised = part.count(False), part.claim.before, part.count(True)
    texts = [str(kept)] * bool(kept.all) + [f"{before}*"] * bool(before.all)
    return f"[{part.claim.title}](#{part.claim.name})", " and ".join(texts), str(revised) if revised.all else "–"


def _earlier(earlier: Sequence[Earlier]) -> list[str]:
    rows = [
        (one.claim, one.source, f"{one.first}*", f"{one.revised}*" if one.revised.all else "–", one.found)
        for one in earlier
    ]
    header = ("claim", "paper", "criteria as first written, met", "revised criteria, met", "found")
    return (
        ['<a id="earlier"></a>\n\n## Claims whose programs are in release 0.3.0', table(header, rows)] if rows else []
    )


def _cost(found: Findings) -> list[str]:
    seconds = found.seconds
    if not seconds:
        return []
    missing = [part.claim.name for part in found.parts if part.claim.name not in seconds]
    text = (
        f"The runs took {sum(seconds.values()) / 60:.0f} minutes of one core "
        f"({listed([f'{name} {value / 60:.1f}' for name, value in seconds.items()])}"
        + (f"; {listed(missing)} were not measured" if missing else "")
        + ")."
    )
    return ["## What it takes", text]


def _failures(found: Findings) -> str:
    rows = [
        (
            f"[{part.claim.name}](#{part.claim.name})",
            *(_written(check), check.criterion, check.here, VERDICTS[check.holds]),
        )
        for part in found.parts
        for check in part.section.checks
        if check.holds is not True
    ]
    if not rows:
        return "Nothing: all criteria are met."
    return table(("claim", "written", "criterion", "here", "met"), rows)


def _written(check: Check) -> str:
    return "revised" if check.revised else "first"


def _claim(number: int, part: Part) -> list[str]:
    claim, section = part.claim, part.section
    rows = [
        [str(place), _written(check), check.criterion, check.paper, check.here, VERDICTS[check.holds]]
        for place, check in enumerate(section.checks, 1)
    ]
    return [
        f'<a id="{claim.name}"></a>\n\n## {number}. {claim.title}',
        f"{claim.says} *{claim.source}*",
        f"**{verdict(section).capitalize()}.**",
        table(("", "written", "criterion", "paper", "here", "met"), rows),
        f"Setting: {section.setting}",
        *(_block(block) for block in section.blocks),
    ]


def _block(block: Table | Figure | str) -> str:
    if isinstance(block, Table):
        return f"{block.title}:\n\n{table(block.header, block.rows)}"
    if isinstance(block, Figure):
        return f"![{block.caption}]({block.file})\n\n*{block.caption}*"
    return block
