"""What a worker records in its metrics; `kvrelay.rpc.metrics.families` says what each is."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvrelay.engine.engine import Engine
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.internal.v1.worker_pb2 import DecodeReport, Failure, Load, PrefillReport
from kvrelay.rpc.metrics import families
from kvrelay.rpc.metrics.metric_set import MetricSet, Total
from kvrelay.transfer.endpoint import Endpoint, TransferStats

_STATES = ("free", "cached", "held")


@dataclass(frozen=True, slots=True)
class Watched:
    """What the metrics read whenever Prometheus does, perhaps on another thread."""

    engine: Engine
    load: Callable[[], Load]
    """The worker's current load."""
    endpoint: Endpoint[Any] | None
    """This worker's end of its hand-offs; None for a co-located one."""


class WorkerMetrics:
    """A worker's metrics, from the start of its process on."""

    def __init__(self, worker: str, role: str) -> None:
        """`worker`, `role`: labels of each metric."""
        self.metrics = metrics = MetricSet("worker", worker=worker, role=role)
        self._steps = {kind: metrics.histogram(families.STEP_SECONDS, kind) for kind in families.STEP.values}
        self._sequences = metrics.histogram(families.BATCH_SEQUENCES)
        self._tokens = metrics.histogram(families.BATCH_TOKENS)
        self._computed = metrics.counter(families.COMPUTED_TOKENS)
        self._launches = {
            graph: metrics.counter(families.LAUNCHES, "graph" if graph else "kernels") for graph in (True, False)
        }
        self._prefill_queue = metrics.histogram(families.PREFILL_QUEUE)
        self._prefill = metrics.histogram(families.PREFILL)
        self._decode_queue = metrics.histogram(families.DECODE_QUEUE)
        self._transfer = metrics.histogram(families.TRANSFER)
        self._exposed = metrics.histogram(families.EXPOSED)
        self._sent_bytes = metrics.counter(families.SENT_BYTES)
        self._received_bytes = metrics.counter(families.RECEIVED_BYTES)
        self._fences = metrics.counter(families.WORKER_FENCES)

    def watch(self, watched: Watched) -> None:
        """The model is loaded: from now on the metrics follow what the worker does."""
        engine, endpoint, total = watched.engine, watched.endpoint, self.metrics.total
        scheduler = engine.scheduler
        # Each is read as one number, so no lock is needed.
        totals: list[tuple[Total, Callable[[], int]]] = [
            (total(families.PREFIX_QUERIES), lambda: scheduler.prefix.queried_tokens),
            (total(families.PREFIX_HITS), lambda: scheduler.prefix.hit_tokens),
            (total(families.EVICTIONS), lambda: scheduler.prefix.pool.evictions),
            (total(families.PREEMPTIONS), lambda: scheduler.preemptions),
        ]
        if endpoint is not None:
            totals += [
                (total(families.CHECKSUM_FAILURES), lambda: endpoint.corrupt),
                (total(families.FENCED_MESSAGES), lambda: endpoint.dropped),
                (total(families.LEASES_EXPIRED), lambda: endpoint.expired),
                (total(families.LINKS_ENDED), lambda: endpoint.links_ended),
            ]
            totals += [
                (total(families.HANDOFF_FAILURES, code), partial(endpoint.failures.__getitem__, code))
                for code in families.HANDOFF_REASON.values
            ]

        def update() -> None:
            for followed, count in totals:
                followed.set(count())
            self._follow(watched.load(), 0 if endpoint is None else endpoint.active)

        self.metrics.before_scrape(update)
        engine.on_step = self._on_step

    def _follow(self, load: Load, leases: int) -> None:
        metrics = self.metrics
        for state in _STATES:
            metrics.gauge(families.KV_BLOCKS, state).set(getattr(load.blocks, state))
        counts = {
            "waiting": load.requests.waiting,
            "running": load.requests.running,
            "promised": load.promised.requests,
        }
        for state, count in counts.items():
            metrics.gauge(families.WORKER_REQUESTS, state).set(count)
        metrics.gauge(families.PENDING_TOKENS).set(load.pending_tokens)
        metrics.gauge(families.LEASES).set(leases)

    # Event loop.

    def prefilled(self, report: PrefillReport) -> None:
        """The first token of a prompt that was computed here was sent."""
        self._prefill_queue.observe(report.queue_seconds)
        self._prefill.observe(report.prefill_seconds)

    def decoded(self, report: DecodeReport) -> None:
        """The first token of a request whose KV came from another worker was sent."""
        self._decode_queue.observe(report.queue_seconds)

    def returned(self, code: "Failure.Code") -> None:
        """A request was given back to its router."""
        self.metrics.counter(families.REQUEST_FAILURES, Failure.Code.Name(code).removeprefix("CODE_").lower()).inc()
        if code == Failure.CODE_FENCED:
            self._fences.inc()

    def sent(self, stats: TransferStats) -> None:
        """A hand-off of this prefill worker was acknowledged."""
        self._sent_bytes.inc(stats.nbytes)
        self._handed_over(stats)

    def received(self, stats: TransferStats) -> None:
        """A hand-off to this decode worker was committed."""
        self._received_bytes.inc(stats.nbytes)
        self._handed_over(stats)

    def _handed_over(self, stats: TransferStats) -> None:
        self._transfer.observe(stats.transfer_seconds)
        self._exposed.observe(stats.handoff_seconds)

    # Engine thread.

    def _on_step(self, plan: StepPlan, out: StepOutput, seconds: float) -> None:
        self._steps[plan.kind].observe(seconds)
        self._sequences.observe(plan.num_rows)
        self._tokens.observe(plan.num_tokens)
        self._computed.inc(plan.num_tokens)
        self._launches[out.graph].inc()
