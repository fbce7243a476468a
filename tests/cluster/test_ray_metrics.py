"""The metrics that Ray's agents export: what they are, and on which thread each part of the work is done."""

import asyncio
import threading

import pytest

from kvrelay.cluster.ray import metrics as ray_metrics
from kvrelay.rpc.metrics import families
from kvrelay.rpc.metrics.metric_set import MetricSet

SECONDS = 30.0


class Ray:
    """Takes gauges as Ray's own class does; the first values only when `answering` is set."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self.threads: set[int] = set()
        self.answering = threading.Event()

    def gauge(self, name: str, description: str, labels: tuple[str, ...]) -> "Gauge":
        assert description
        return Gauge(self, name, labels)


class Gauge:
    def __init__(self, ray: Ray, name: str, labels: tuple[str, ...]) -> None:
        self._ray, self._name, self._labels = ray, name, labels

    def set(self, value: float, labels: dict[str, str]) -> None:
        assert self._ray.answering.wait(SECONDS)
        self._ray.threads.add(threading.get_ident())
        self._ray.values[self._name, *(labels[name] for name in self._labels)] = value


def test_values_are_taken_on_the_event_loop_and_handed_over_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, metrics, read_by = Ray(), MetricSet("supervisor"), list[int]()
    begun, changed = asyncio.Event(), asyncio.Event()

    def update() -> None:
        read_by.append(threading.get_ident())
        metrics.gauge(families.HEARTBEAT_AGE, "worker-0").set(len(read_by))
        begun.set()
        if len(read_by) > 2:
            changed.set()
        elif len(read_by) == 2:
            raise OSError("once")  # which ends nothing

    async def test() -> None:
        metrics.before_scrape(update)
        exporting = asyncio.create_task(ray_metrics.export(metrics))
        await asyncio.wait_for(begun.wait(), SECONDS)
        await asyncio.sleep(0)  # the event loop goes on though Ray doesn't answer
        assert ray.values == {}
        ray.answering.set()
        await asyncio.wait_for(changed.wait(), SECONDS)
        exporting.cancel()
        await asyncio.wait((exporting,))
        assert exporting.cancelled()

    monkeypatch.setattr(ray_metrics, "Gauge", ray.gauge)
    monkeypatch.setattr(ray_metrics, "INTERVAL_SECONDS", 0.0)
    asyncio.run(test())
    assert set(read_by) == {threading.get_ident()}
    assert threading.get_ident() not in ray.threads
    assert ray.values["kvrelay_supervisor_heartbeat_age_seconds", "worker-0"] >= 1.0
    assert all(name.startswith("kvrelay_") and not name.endswith("_created") for name, *_ in ray.values)
