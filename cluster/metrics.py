"""Metrics of routers and workers as Ray metrics, named kvrelay_<part>_<what>_<unit>; docs/metrics.md lists them.

Prometheus scrapes them from every node of the Ray cluster; Ray adds the prefix `ray_` and labels of node and process.
"""

from ray.util.metrics import Counter, Gauge, Histogram

from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.router.metrics import COUNTERS, HISTOGRAMS, QUEUE, REQUESTS
from kvrelay.router.trace import RequestRecord


class RouterMetrics:
    """A router's observer of ended requests and of its load."""

    def __init__(self, router: str) -> None:
        name, text = REQUESTS
        self._requests = Counter(f"kvrelay_{name}", text, ("router", "outcome"))
        self._histograms = {
            field: Histogram(f"kvrelay_{name}", text, buckets, ("router",))
            for field, (name, text, buckets) in HISTOGRAMS.items()
        }
        self._counters = {
            field: Counter(f"kvrelay_{name}", text, ("router",)) for field, (name, text) in COUNTERS.items()
        }
        name, text = QUEUE
        self._queue = Gauge(f"kvrelay_{name}", text, ("router",))
        self._tags = {"router": router}

    def observe_load(self, load: Load) -> None:
        """Takes the number of waiting requests."""
        self._queue.set(load.requests.waiting, self._tags)

    def __call__(self, record: RequestRecord) -> None:
        self._requests.inc(1, {**self._tags, "outcome": record.outcome})
        for field, histogram in self._histograms.items():
            if (seconds := getattr(record, field)) is not None:
                histogram.observe(seconds, self._tags)
        for field, counter in self._counters.items():
            if amount := getattr(record, field):
                counter.inc(amount, self._tags)


class WorkerMetrics:
    """A worker's observer of its load."""

    def __init__(self, worker: str, role: str) -> None:
        keys = ("worker", "role")
        self._blocks = Gauge("kvrelay_worker_kv_blocks", "KV blocks by state: free, cached, held.", (*keys, "state"))
        self._requests = Gauge("kvrelay_worker_requests", "Requests by state: waiting, running.", (*keys, "state"))
        self._pending = Gauge("kvrelay_worker_pending_tokens", "Tokens of requests still to be computed.", keys)
        self._computed = Counter("kvrelay_worker_computed_tokens", "Tokens computed since start.", keys)
        self._tags = {"worker": worker, "role": role}
        self._counted = 0

    def __call__(self, load: Load) -> None:
        for state in ("free", "cached", "held"):
            self._blocks.set(getattr(load.blocks, state), {**self._tags, "state": state})
        for state in ("waiting", "running"):
            self._requests.set(getattr(load.requests, state), {**self._tags, "state": state})
        self._pending.set(load.pending_tokens, self._tags)
        if load.computed_tokens > self._counted:
            self._computed.inc(load.computed_tokens - self._counted, self._tags)
            self._counted = load.computed_tokens
