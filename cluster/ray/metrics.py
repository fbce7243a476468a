"""Shows a process's metrics on Ray, whose agents export them for Prometheus: with the prefix `ray_`, and with labels of
node and process.

Each sample becomes a gauge of its own name (`..._total`, `..._bucket`, `..._sum`, `..._count`): Ray's own counters and
histograms would have to be recorded one event at a time, and its histograms keep only buckets. So queries are those of
the plain metrics, and only the type that Ray announces differs.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from ray.util.metrics import Gauge

from kvrelay.rpc.metrics.metric_set import MetricSet

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 5.0
"""Seconds between two exports; Ray's agents read them every 10 s, and forget metrics that nobody renews."""
PREFIX = "kvrelay_"


class Value(NamedTuple):
    """The present value of one series."""

    name: str
    help: str
    labels: dict[str, str]
    value: float


async def export(metrics: MetricSet) -> None:
    """Exports the metrics of this process until it is cancelled.

    Their values are taken on the event loop, which changes what they tell of; a thread hands them to Ray, which may
    take its time.
    """
    gauges: dict[str, Gauge] = {}
    while True:
        try:
            await asyncio.to_thread(_tell, gauges, _values(metrics))
        except Exception:
            logger.exception("metrics can't be exported")
        await asyncio.sleep(INTERVAL_SECONDS)


def _values(metrics: MetricSet) -> list[Value]:
    """All of kvrelay's own. The client library adds when a series was made, which the age of the process tells too."""
    return [
        Value(sample.name, family.documentation, sample.labels, sample.value)
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name.startswith(PREFIX) and not sample.name.endswith("_created")
    ]


def _tell(gauges: dict[str, Gauge], values: Sequence[Value]) -> None:
    """Tells Ray the values; `gauges` are those that it knows, by name."""
    for each in values:
        if each.name not in gauges:
            gauges[each.name] = Gauge(each.name, each.help, tuple(each.labels))
        gauges[each.name].set(each.value, each.labels)
