"""Shows a process's metrics on Ray, whose agents export them for Prometheus: with the prefix `ray_`, and with labels of
node and process.

Each sample becomes a gauge of its own name (`..._total`, `..._bucket`, `..._sum`, `..._count`): Ray's own counters and
histograms would have to be recorded one event at a time, and its histograms keep only buckets. So queries are those of
the plain metrics, and only the type that Ray announces differs.
"""

import logging
import threading

from ray.util.metrics import Gauge

from kvrelay.rpc.metrics.metric_set import MetricSet

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 5.0
"""Between two exports; Ray's agents read them every 10 s, and forget those that nobody renews."""
PREFIX = "kvrelay_"


class RayExport:
    """Exports the metrics of one process until it ends, from a thread of its own."""

    def __init__(self, metrics: MetricSet) -> None:
        self._recorder = metrics
        self._gauges: dict[str, Gauge] = {}
        threading.Thread(target=self._run, name="metrics", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            try:
                self.export()
            except Exception:
                logger.exception("metrics can't be exported")
            pause.wait(INTERVAL_SECONDS)

    def export(self) -> None:
        """Tells Ray the present values."""
        for family in self._recorder.registry.collect():
            for sample in family.samples:
                # The client library adds when a series was made, which the age of the process tells as well.
                if sample.name.startswith(PREFIX) and not sample.name.endswith("_created"):
                    gauge = self._gauges.get(sample.name)
                    if gauge is None:
                        gauge = Gauge(sample.name, family.documentation, tuple(sample.labels))
                        self._gauges[sample.name] = gauge
                    gauge.set(sample.value, sample.labels)
