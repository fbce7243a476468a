"""What routers and workers observe, as Ray metrics named kvrelay_<part>_<what>_<unit>.

Prometheus scrapes them from every node of the Ray cluster; Ray adds the prefix `ray_` and labels of node and process.
"""

from ray.util.metrics import Counter, Gauge, Histogram

from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.router.trace import RequestRecord

# From a millisecond to a minute; each step about a doubling.
SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0]
TOKEN_SECONDS = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0]


class RouterMetrics:
    """A router's observer of requests that are over, and of its load."""

    def __init__(self, router: str) -> None:
        self._requests = Counter("kvrelay_router_requests", "Requests that are over.", ("router", "outcome"))
        self._retries = Counter("kvrelay_router_retries", "Placements after losing a worker.", ("router",))
        self._seconds = {
            field: Histogram(name, text, TOKEN_SECONDS if field == "tpot_seconds" else SECONDS, ("router",))
            for field, name, text in (
                ("ttft_seconds", "kvrelay_router_ttft_seconds", "Received to first token sent."),
                ("tpot_seconds", "kvrelay_router_tpot_seconds", "Between two tokens of a request after its first."),
                ("total_seconds", "kvrelay_router_request_seconds", "Received to last message."),
                ("router_queue_seconds", "kvrelay_router_queue_seconds", "Waited for room on a decode worker."),
                ("queue_seconds", "kvrelay_prefill_queue_seconds", "Submitted to first scheduled."),
                ("prefill_seconds", "kvrelay_prefill_compute_seconds", "First scheduled to first token sampled."),
                ("transfer_seconds", "kvrelay_transfer_push_seconds", "First chunk pushed to all acknowledged."),
                ("handoff_seconds", "kvrelay_transfer_handoff_seconds", "The part of the push after prefill's end."),
                ("decode_queue_seconds", "kvrelay_decode_queue_seconds", "KV committed to first scheduled."),
            )
        }
        self._amounts = {
            field: Counter(name, text, ("router",))
            for field, name, text in (
                ("transfer_bytes", "kvrelay_transfer_kv_bytes", "KV that crossed links."),
                ("prompt_tokens", "kvrelay_router_prompt_tokens", "Tokens of prompts."),
                ("cached_tokens", "kvrelay_router_cached_tokens", "Prompt tokens found in prefix caches."),
                ("completion_tokens", "kvrelay_router_completion_tokens", "Tokens generated."),
            )
        }
        self._queue = Gauge("kvrelay_router_queue_requests", "Requests that wait for room on decode.", ("router",))
        self._tags = {"router": router}

    def observe_load(self, load: Load) -> None:
        """Takes what waits and runs here now."""
        self._queue.set(load.requests.waiting, self._tags)

    def __call__(self, record: RequestRecord) -> None:
        self._requests.inc(1, {**self._tags, "outcome": record.outcome})
        if record.retries:
            self._retries.inc(record.retries, self._tags)
        for field, histogram in self._seconds.items():
            seconds = getattr(record, field)
            if seconds is not None:
                histogram.observe(seconds, self._tags)
        for field, counter in self._amounts.items():
            amount = getattr(record, field)
            if amount:
                counter.inc(amount, self._tags)


class WorkerMetrics:
    """A worker's observer of its load."""

    def __init__(self, worker: str, role: str) -> None:
        keys = ("worker", "role")
        self._blocks = Gauge("kvrelay_worker_kv_blocks", "KV blocks by state.", (*keys, "state"))
        self._requests = Gauge("kvrelay_worker_requests", "Requests by state.", (*keys, "state"))
        self._pending = Gauge("kvrelay_worker_pending_tokens", "Tokens yet to be computed.", keys)
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
