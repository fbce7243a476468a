"""Metrics of routers and workers as Ray metrics, named kvrelay_<part>_<what>_<unit>; docs/metrics.md lists them.

Prometheus scrapes them from every node of the Ray cluster; Ray adds the prefix `ray_` and labels of node and process.
"""

from ray.util.metrics import Counter, Gauge, Histogram

from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.router.trace import RequestRecord

# From a millisecond to a minute; each step about doubles.
SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0]
TOKEN_SECONDS = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0]

HISTOGRAMS = {
    "ttft_seconds": ("router_ttft_seconds", "From a request's arrival to its first token.", SECONDS),
    "tpot_seconds": ("router_tpot_seconds", "Mean time between two tokens after the first.", TOKEN_SECONDS),
    "total_seconds": ("router_request_seconds", "From a request's arrival to its last message.", SECONDS),
    "router_queue_seconds": ("router_queue_seconds", "Waited for capacity on a decode worker.", SECONDS),
    "queue_seconds": ("prefill_queue_seconds", "From submission to the first scheduled step.", SECONDS),
    "prefill_seconds": ("prefill_compute_seconds", "From the first scheduled step to the first token.", SECONDS),
    "transfer_seconds": ("transfer_push_seconds", "From the first frame to the acknowledgement of all.", SECONDS),
    "handoff_seconds": ("transfer_handoff_seconds", "The part of the transfer after the end of prefill.", SECONDS),
    "decode_queue_seconds": ("decode_queue_seconds", "From the KV's commit to the first scheduled step.", SECONDS),
}
"""Field of RequestRecord, metric, meaning, buckets."""
COUNTERS = {
    "retries": ("router_retries", "Placements after a failed attempt."),
    "migrations": ("router_migrations", "Placements of requests whose worker drains."),
    "resumed": ("router_resumes", "Calls that continue a request whose earlier call was lost."),
    "transfer_bytes": ("transfer_kv_bytes", "KV sent over links."),
    "prompt_tokens": ("router_prompt_tokens", "Tokens of prompts."),
    "cached_tokens": ("router_cached_tokens", "Prompt tokens found in prefix caches."),
    "completion_tokens": ("router_completion_tokens", "Generated tokens."),
}
"""Field of RequestRecord, metric, meaning."""


class RouterMetrics:
    """A router's observer of ended requests and of its load."""

    def __init__(self, router: str) -> None:
        self._requests = Counter("kvrelay_router_requests", "Requests that have ended.", ("router", "outcome"))
        self._histograms = {
            field: Histogram(f"kvrelay_{name}", text, buckets, ("router",))
            for field, (name, text, buckets) in HISTOGRAMS.items()
        }
        self._counters = {
            field: Counter(f"kvrelay_{name}", text, ("router",)) for field, (name, text) in COUNTERS.items()
        }
        self._queue = Gauge("kvrelay_router_queue_requests", "Requests that wait for capacity on decode.", ("router",))
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
