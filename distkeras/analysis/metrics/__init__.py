"""What a run's history and commits say: curves, the efficiencies of the thesis, staleness, gap, scale factors.

``history`` has the columns worker, epoch, iteration, timestamp, loss, each metric, samples: one row a mini-batch.
``commits`` has clock, worker, sequence, staleness, steps and more: one row an update of the center variable. Both may
be Spark or pandas DataFrames, and a simulation's `Trace` may stand for ``commits``, but where its history is asked for
too; results are plain numbers or pandas DataFrames. `analysis.implicit_momentum` measures the momentum that asynchrony
implies.

Reference:
    Hermans: On Scalable Deep Learning and Parallelizing Gradient Descent, 2017, sections 1.3 and 3.4.
    Hakimi et al.: Taming Momentum in a Distributed Asynchronous Environment, 2019, appendix B.3 (the gap).
"""

from distkeras.analysis.metrics.commits import (
    MEASURES,
    Measure,
    over_commits,
    recorded_schedule,
    staleness_histogram,
    values,
)
from distkeras.analysis.metrics.curves import HISTORY_KEYS, averaged, per_worker
from distkeras.analysis.metrics.efficiency import (
    Mode,
    efficiencies,
    hardware_efficiency,
    statistical_efficiency,
    temporal_efficiency,
    updates_to_target,
)

__all__ = [
    "HISTORY_KEYS",
    "MEASURES",
    "Measure",
    "Mode",
    "averaged",
    "efficiencies",
    "hardware_efficiency",
    "over_commits",
    "per_worker",
    "recorded_schedule",
    "staleness_histogram",
    "statistical_efficiency",
    "temporal_efficiency",
    "updates_to_target",
    "values",
]
