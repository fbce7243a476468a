"""The metrics of a router: what each is, and their text for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.router.trace import RequestRecord

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

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
REQUESTS = ("router_requests", "Requests that have ended.")
QUEUE = ("router_queue_requests", "Requests that wait for capacity on decode.")


class PrometheusMetrics:
    """A router's observer of ended requests and of its load. Used on the event loop only."""

    def __init__(self, router: str) -> None:
        """`router`: its name, a label of each metric."""
        self._registry = registry = CollectorRegistry()
        name, text = REQUESTS
        self._requests = Counter(f"kvrelay_{name}", text, ("router", "outcome"), registry=registry)
        self._histograms = {
            field: Histogram(f"kvrelay_{name}", text, ("router",), buckets=buckets, registry=registry).labels(router)
            for field, (name, text, buckets) in HISTOGRAMS.items()
        }
        self._counters = {
            field: Counter(f"kvrelay_{name}", text, ("router",), registry=registry).labels(router)
            for field, (name, text) in COUNTERS.items()
        }
        name, text = QUEUE
        self._queue = Gauge(f"kvrelay_{name}", text, ("router",), registry=registry).labels(router)
        self._router = router

    def observe_load(self, load: Load) -> None:
        """Takes the number of waiting requests."""
        self._queue.set(load.requests.waiting)

    def __call__(self, record: RequestRecord) -> None:
        self._requests.labels(self._router, record.outcome).inc()
        for field, histogram in self._histograms.items():
            if (seconds := getattr(record, field)) is not None:
                histogram.observe(seconds)
        for field, counter in self._counters.items():
            if amount := getattr(record, field):
                counter.inc(amount)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
