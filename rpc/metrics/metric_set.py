"""The metrics of one process: their values, and their text for Prometheus."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.registry import Collector

from kvrelay.machine import VERSION
from kvrelay.rpc.metrics.families import BUILD_HELP, BUILD_LABELS, BUILD_NAME, COMMON, FAMILIES, Family, Part

Metric = Counter | Gauge | Histogram


class MetricSet:
    """Holds every family of one part. Values may be recorded on any thread; the event loop reads them."""

    def __init__(self, part: Part, **common: str) -> None:
        """
        Args:
            common: the values of the part's common labels.
        """
        self.registry = CollectorRegistry()
        """Registry of Prometheus' client library."""
        self._labels = {label: common[label] for label in COMMON[part]}
        self._common = tuple(self._labels.values())
        # Collectors are asked in the order of their registration, so this one updates the others' values.
        self._updates = _Updates()
        self.registry.register(self._updates)
        self._found: dict[tuple[Family, tuple[str, ...]], Any] = {}
        """Cache of the series that were looked up."""
        self._metrics = {family: self._make(family) for family in FAMILIES if family.part == part}
        build = Gauge(BUILD_NAME, BUILD_HELP, BUILD_LABELS, registry=self.registry)
        build.labels(VERSION, part, next(iter(common.values()), part)).set(1)
        ProcessCollector(registry=self.registry)

    def before_scrape(self, update: Callable[[], None]) -> None:
        """Has `update` called, on the event loop, whenever the values are read: it sets those that need not be recorded
        at once."""
        self._updates.calls.append(update)

    def counter(self, family: Family, *values: str) -> Counter:
        """One series of a family: `values` are of its own labels, in their order."""
        return self._series(family, values)  # type: ignore[no-any-return]  # its kind is the caller's to know

    def gauge(self, family: Family, *values: str) -> Gauge:
        """One series of a gauge; `values` as for `counter`."""
        return self._series(family, values)  # type: ignore[no-any-return]

    def histogram(self, family: Family, *values: str) -> Histogram:
        """One series of a histogram; `values` as for `counter`."""
        return self._series(family, values)  # type: ignore[no-any-return]

    def relabel(self, **common: str) -> None:
        """Gives some common labels other values from now on: gauges have those only, what was counted stays."""
        self._labels |= common
        self._common = tuple(self._labels.values())
        self._found.clear()
        for family, metric in self._metrics.items():
            if family.kind == "gauge":
                metric.clear()
            self._begin(family, metric)

    def forget(self, family: Family, *values: str) -> None:
        """Removes a series that will get no more values."""
        self._found.pop((family, values), None)
        self._metrics[family].remove(*self._common, *values)

    def total(self, family: Family, *values: str) -> "Total":
        """A counter whose value is counted elsewhere."""
        return Total(self.counter(family, *values))

    def _series(self, family: Family, values: tuple[str, ...]) -> Any:
        found = self._found.get((family, values))
        if found is None:
            metric = self._metrics[family]
            found = metric.labels(*self._common, *values) if self._common or values else metric
            self._found[family, values] = found
        return found

    def _make(self, family: Family) -> Metric:
        metric: Metric
        if family.kind == "counter":
            metric = Counter(family.name, family.help, family.label_names, registry=self.registry)
        elif family.kind == "gauge":
            metric = Gauge(family.name, family.help, family.label_names, registry=self.registry)
        else:
            metric = Histogram(
                family.name, family.help, family.label_names, registry=self.registry, buckets=family.buckets
            )
        self._begin(family, metric)
        return metric

    def _begin(self, family: Family, metric: Metric) -> None:
        """Makes the series whose labels are known: one that appears with its first event hides that from `rate`."""
        if family.label_names:
            for values in itertools.product(*(label.values for label in family.labels)):
                metric.labels(*self._common, *values)


class Total:
    """Follows a count that only grows, kept by code that records no metrics."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._seen = 0.0

    def begin(self, count: float) -> "Total":
        """Starts at `count`: the counter gets only what is counted later, as the rest belongs to another series."""
        self._seen = count
        return self

    def set(self, count: float) -> None:
        """Sets the count."""
        if count > self._seen:
            self._counter.inc(count - self._seen)
            self._seen = count


class _Updates(Collector):
    """Collector without metrics of its own, which calls the updates before each scrape."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def collect(self) -> Iterable[Any]:
        for call in self.calls:
            call()
        return ()
