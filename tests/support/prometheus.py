"""The metrics that a callback serves for Prometheus."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from distkeras import PrometheusMetrics
from support.patience import patience


def numbers(metrics: PrometheusMetrics) -> dict[str, float]:
    """Return the gauges by their names."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=patience(20)) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {sample.name: sample.value for family in families for sample in family.samples}
