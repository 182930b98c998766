"""The Markdown report. Every figure in it comes from the results; nothing is written by hand."""

from __future__ import annotations

from collections.abc import Sequence

from reproduction.claims import Claim, Figure, Scale, Section, Table

FRAME = (
    "Claims of five papers, run again at small scale with the simulator of the parameter server: a virtual clock, "
    "the server's own update rules, and a perceptron (784-32-10, ReLU, softmax cross-entropy, mini-batches of 32) on "
    "Fashion-MNIST, or Beale's function. The papers trained larger networks on other data for longer; what can be "
    "compared is who is ahead, who diverges and by how much, not the accuracies as such."
)


HONESTY = (
    "The criteria were written down before the first run and have not been changed since. After it, grids of learning "
    "rates (compensation, ormo, throughput, daso) were extended, or moved, past the edge at which best rates lay; "
    "among them SSGDm's, which had been too high for it to train at all. The runs at a quarter of the rate (momentum) "
    "were added, and count for no criterion. “(edge)” marks a rate that is still the first or the last of its grid: a "
    "better one may lie outside."
)


def verdict(section: Section) -> str:
    """How many of the criteria are met, in words."""
    met, all_of = sum(check.holds for check in section.checks), len(section.checks)
    if met == all_of:
        return "reproduced"
    return f"reproduced in part ({met} of {all_of} criteria)" if met else "not reproduced"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def report(sections: Sequence[tuple[Claim, Section]], scale: Scale, command: str) -> str:
    """The whole text."""
    claims = [
        (f"[{claim.title}](#{claim.name})", f"{sum(c.holds for c in part.checks)} of {len(part.checks)}", verdict(part))
        for claim, part in sections
    ]
    failed = [(claim, check) for claim, part in sections for check in part.checks if not check.holds]
    total = sum(len(part.checks) for _, part in sections)
    lines = [
        "# Reproduction of the papers' claims",
        FRAME,
        HONESTY,
        f"Made by `{command}` ({scale.name} mode, {len(scale.seeds)} seeds); do not edit. The figures are in "
        "[results.json](results.json). Spreads are mean ± standard deviation over the seeds.",
        f"{total - len(failed)} of {total} criteria are met.",
        table(("claim", "criteria met", "verdict"), claims),
        "## What does not reproduce at this scale",
    ]
    if failed:
        rows = [(f"[{claim.name}](#{claim.name})", check.criterion, check.here) for claim, check in failed]
        lines.append(table(("claim", "criterion", "here"), rows))
    else:
        lines.append("Nothing: all criteria are met.")
    for number, (claim, part) in enumerate(sections, 1):
        lines += _claim(number, claim, part)
    return "\n\n".join(lines) + "\n"


def _claim(number: int, claim: Claim, section: Section) -> list[str]:
    rows = [(check.criterion, check.paper, check.here, "yes" if check.holds else "**no**") for check in section.checks]
    lines = [
        f'<a id="{claim.name}"></a>\n\n## {number}. {claim.title}',
        f"{claim.says} *{claim.source}*",
        f"**Verdict: {verdict(section)}.**",
        table(("criterion", "paper", "here", "met"), rows),
        f"Setting: {section.setting}",
    ]
    for block in section.blocks:
        if isinstance(block, Table):
            lines.append(f"{block.title}:\n\n{table(block.header, block.rows)}")
        elif isinstance(block, Figure):
            lines.append(f"![{block.caption}]({block.file})\n\n*{block.caption}*")
        else:
            lines.append(block)
    return lines
