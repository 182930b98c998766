"""Claim 10 with a rate for each kind, more nodes and more seeds: differences with their intervals."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

from reproduction import draw
from reproduction.claims import Criteria, Job, Results, Scale
from reproduction.daso import COST, DEVICES, NEAR, trained
from reproduction.parts import Check, Figure, Section, Table
from reproduction.revised.cells import best
from reproduction.spreads import Spread, chosen, listed

#: Mini-batches of an epoch, half as many as for the first criteria.
EPOCH = 480
RATES = (0.2, 0.1, 0.05)
NODES = (2, 4, 8, 16)
KINDS = {"blocking": True, "daso": False}


@cache
def _rate(blocking: bool, nodes: int, epoch: int) -> float:
    return best({rate: trained(blocking, nodes, rate, epoch, 0, "held out")["accuracy"] for rate in RATES})


def measured(kind: str, nodes: int, epoch: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return the figures of one kind at its own rate, by seed."""
    rate = _rate(KINDS[kind], nodes, epoch)
    figures = [trained(KINDS[kind], nodes, rate, epoch, seed) for seed in seeds]
    return {"rate": rate, **{key: [one[key] for one in figures] for key in ("accuracy", "time")}}


def jobs(scale: Scale) -> dict[str, Job]:
    """Return the jobs of the revised criteria of claim 10."""
    return {
        f"{kind}/{nodes}": partial(measured, kind, nodes, scale.budget(EPOCH), scale.many)
        for nodes in NODES
        for kind in KINDS
    }


def section(results: Results, scale: Scale, folder: Path) -> Section:
    """Return the section about claim 10, from its figures."""
    accuracy = {kind: {n: Spread.of(results[f"{kind}/{n}"]["accuracy"]) for n in NODES} for kind in KINDS}
    behind = {n: accuracy["blocking"][n] - accuracy["daso"][n] for n in NODES}
    few, many = NODES[0], NODES[-1]
    further = behind[many] - behind[few]
    checks = [
        Check(
            f"{few} nodes: DASO's test accuracy is less than {NEAR:g} point below blocking synchronization's",
            "“similar levels of accuracy” up to 128 GPUs (Figure 7)",
            f"behind by {behind[few].interval()} points",
            behind[few].below(NEAR / 100),
            first=1,
        ),
        Check(
            f"DASO falls further behind blocking synchronization with {many} nodes than with {few}",
            "with many GPUs the loss of accuracy is “more pronounced” with DASO (Figure 7, conclusion)",
            f"by {further.interval()} points",
            further.above(0),
            first=4,
        ),
    ]
    table = Table(
        f"{DEVICES} devices a node",
        ("nodes", "blocking: rate", "test accuracy (%)", "DASO: rate", "test accuracy (%)", "behind (points)"),
        [
            (
                str(n),
                *(
                    text
                    for kind in KINDS
                    for text in (chosen(results[f"{kind}/{n}"]["rate"], RATES), accuracy[kind][n].percent)
                ),
                behind[n].interval(),
            )
            for n in NODES
        ],
    )
    setting = (
        f"As first (a blocking exchange takes {COST:g} step times), with {listed(NODES)} nodes, epochs of "
        f"{scale.budget(EPOCH):,} mini-batches, and a rate of "
        f"{listed(RATES)} for each kind: the best with seed 0. Seeds {scale.many[0]} to {scale.many[-1]}."
    )
    caption = (
        "Left: test accuracy; the axis begins at 0. Right: how far DASO is behind blocking synchronization, seed by "
        "seed (dots), with the mean's 95 % interval."
    )
    return Section(setting, checks, [table, Figure(_picture(accuracy, behind, folder), caption)])


def _picture(accuracy: dict[str, dict[int, Spread]], behind: dict[int, Spread], folder: Path) -> str:
    figure, axes = draw.panels(2, 1, 3.0)
    left, right = axes[0]
    for place, (kind, title) in enumerate({"blocking": "blocking", "daso": "DASO"}.items()):
        shift = 1.03 ** (2 * place - 1)  # bars of one number next to each other
        x = [n * DEVICES * shift for n in NODES]
        draw.spreads(left, x, list(accuracy[kind].values()), place, title, 100)
    left.set_ylim(0, 100)
    draw.finish(left, "devices", "test accuracy (%)")
    for n, one in behind.items():
        right.plot([n * DEVICES] * len(one.values), [100 * v for v in one.values], ".", color="#888888", markersize=5)
    right.errorbar(
        [n * DEVICES for n in NODES],
        [100 * one.mean for one in behind.values()],
        [100 * one.error for one in behind.values()],
        capsize=4,
        **{**draw.style(1), "linestyle": ""},
    )
    right.axhline(0, color="black", linewidth=0.8)
    draw.finish(right, "devices", "DASO behind by (points)", legend=False)
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks([n * DEVICES for n in NODES], [str(n * DEVICES) for n in NODES])
    return draw.save(figure, folder, "daso.png")


REVISED = Criteria(jobs, section)
