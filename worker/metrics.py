"""The metrics that a worker records; `kvrelay.rpc.metrics.families` says what each is."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kvrelay.engine.engine import Engine
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.internal.v1.worker_pb2 import DecodeReport, Failure, Load, PrefillReport
from kvrelay.rpc.metrics import families
from kvrelay.rpc.metrics.families import Family
from kvrelay.rpc.metrics.metric_set import MetricSet, Total
from kvrelay.transfer.protocol.endpoint import Endpoint, TransferStats

if TYPE_CHECKING:
    from kvrelay.engine.models.loads import ExpertLoads

_STATES = ("free", "cached", "held")


_IMBALANCE_SECONDS = 60.0
"""Seconds, about, whose tokens count for the imbalance of experts."""
_MAX_EXPERTS = 512


class _Experts:
    """Follows the loads of a model's experts, from now on."""

    def __init__(self, loads: "ExpertLoads", metrics: MetricSet) -> None:
        self._loads, self._metrics = loads, metrics
        totals = loads.totals
        self._tokens = [
            metrics.total(families.EXPERT_TOKENS, str(expert)).begin(count)
            for expert, count in enumerate(totals.sum(0).tolist()[:_MAX_EXPERTS])
        ]
        self._seen = [(time.monotonic(), totals, loads.rank_totals)]
        """Times and totals, the oldest first: those that the present ones are compared with, and what will be."""

    def follow(self) -> None:
        """Sets the metrics."""
        now, totals, of_ranks = time.monotonic(), self._loads.totals, self._loads.rank_totals
        for total, count in zip(self._tokens, totals.sum(0).tolist(), strict=False):
            total.set(count)
        while len(self._seen) > 1 and self._seen[1][0] <= now - _IMBALANCE_SECONDS:
            self._seen.pop(0)
        if now - self._seen[-1][0] > _IMBALANCE_SECONDS / 6:
            self._seen.append((now, totals, of_ranks))
        recent = totals - self._seen[0][1]
        for layer, (most, mean) in enumerate(zip(recent.max(1).tolist(), recent.mean(1).tolist(), strict=True)):
            if mean:
                self._metrics.gauge(families.EXPERT_IMBALANCE, str(layer)).set(most / mean)
        without = recent.reshape(len(recent), self._loads.ranks, -1).sum(2)
        for copies, ranks in (("without", without), ("with", of_ranks - self._seen[0][2])):
            if ranks.any():
                share = float(ranks.max(1).sum() / ranks.mean(1).sum())
                self._metrics.gauge(families.EXPERT_RANK_IMBALANCE, copies).set(share)


class WorkerMetrics:
    """A worker's metrics, from the start of its process on."""

    def __init__(self, worker: str, role: str, model_name: str) -> None:
        """`worker`, `role`, `model_name`: labels of each metric."""
        self.metrics = MetricSet("worker", worker=worker, role=role, model_name=model_name)
        self._totals: list[tuple[Total, Callable[[], float]]] = []
        """Totals that are kept elsewhere. Each is read as one number, so no lock is needed."""
        self._endpoint: Endpoint[Any] | None = None
        self._experts: _Experts | None = None
        self._bind()

    def watch(
        self,
        engine: Engine,
        load: Callable[[], Load],
        endpoint: Endpoint[Any] | None,
        cost_errors: Callable[[], Mapping[str, float]],
    ) -> None:
        """Follows what the worker does from now on, when its model is loaded.

        Args:
            load: the worker's current load.
            endpoint: its end of its hand-offs; None for a co-located one.
            cost_errors: mean relative errors of predicted times, by what they are of.
        """
        self._count(engine, endpoint)

        def update() -> None:
            for total, count in self._totals:
                total.set(count())
            if self._experts is not None:
                self._experts.follow()
            self._follow(load(), 0 if self._endpoint is None else self._endpoint.active)
            for cost, error in cost_errors().items():
                self.metrics.gauge(families.COST_ERROR, cost).set(error)

        self.metrics.before_scrape(update)
        engine.on_step = self._on_step

    def take_role(self, role: str, engine: Engine, endpoint: Endpoint[Any] | None) -> None:
        """Counts for another role from now on, with the same engine. What the worker has counted so far stays the old
        role's.
        """
        for total, count in self._totals:
            total.set(count())
        if self._experts is not None:
            self._experts.follow()
        self.metrics.relabel(role=role)
        self._bind()
        self._count(engine, endpoint)

    def _bind(self) -> None:
        """Looks up the series of the present role."""
        metrics = self.metrics
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
        self._sent_states = metrics.counter(families.SENT_STATES)
        self._received_states = metrics.counter(families.RECEIVED_STATES)

    def _count(self, engine: Engine, endpoint: Endpoint[Any] | None) -> None:
        """Follows the counts of engine and endpoint from now on."""
        self._endpoint = endpoint
        scheduler, prefix = engine.scheduler, engine.scheduler.prefix
        counts: list[tuple[Family, tuple[str, ...], Callable[[], float]]] = [
            (families.PREFIX_QUERIES, (), lambda: prefix.queried_tokens),
            (families.PREFIX_HITS, (), lambda: prefix.hit_tokens),
            (families.EVICTIONS, (), lambda: prefix.pool.evictions),
            (families.PREEMPTIONS, (), lambda: scheduler.preemptions),
        ]
        if scheduler.speculation is not None:
            guesses = scheduler.speculation.counts
            counts += [
                (families.DRAFTS, ("proposed",), lambda: guesses.proposed),
                (families.DRAFTS, ("accepted",), lambda: guesses.accepted),
                (families.DRAFT_STEPS, (), lambda: guesses.steps),
                (families.DRAFT_STEP_TOKENS, (), lambda: guesses.tokens),
                (families.DRAFT_SECONDS, ("with_guesses",), lambda: guesses.seconds),
                (families.DRAFT_SECONDS, ("without",), lambda: guesses.plain_seconds),
            ]
        if endpoint is not None:
            counts += [
                (families.CHECKSUM_FAILURES, (), lambda: endpoint.corrupt),
                (families.FENCED_MESSAGES, (), lambda: endpoint.dropped),
                (families.LEASES_EXPIRED, (), lambda: endpoint.expired),
                (families.IN_PLACE_BYTES, (), lambda: endpoint.in_place_bytes),
                (families.LINKS_ENDED, (), lambda: endpoint.links_ended),
            ]
            counts += [
                (families.HANDOFF_FAILURES, (code,), partial(endpoint.failures.__getitem__, code))
                for code in families.HANDOFF_REASON.values
            ]
        loads = engine.runner.expert_loads
        self._experts = None if loads is None else _Experts(loads, self.metrics)
        total = self.metrics.total
        self._totals = [(total(family, *values).begin(count()), count) for family, values, count in counts]

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
        """Notes that the first token of a prompt that was computed here was sent."""
        self._prefill_queue.observe(report.queue_seconds)
        self._prefill.observe(report.prefill_seconds)

    def decoded(self, report: DecodeReport) -> None:
        """Notes that the first token of a request whose KV came from another worker was sent."""
        self._decode_queue.observe(report.queue_seconds)

    def returned(self, code: "Failure.Code") -> None:
        """Notes that a request was given back to its router."""
        self.metrics.counter(families.REQUEST_FAILURES, Failure.Code.Name(code).removeprefix("CODE_").lower()).inc()

    def sent(self, stats: TransferStats) -> None:
        """Notes that a hand-off of this prefill worker was acknowledged."""
        self._sent_bytes.inc(stats.nbytes)
        self._sent_states.inc(stats.state_nbytes)
        self._handed_over(stats)

    def received(self, stats: TransferStats) -> None:
        """Notes that a hand-off to this decode worker was committed."""
        self._received_bytes.inc(stats.nbytes)
        self._received_states.inc(stats.state_nbytes)
        self._handed_over(stats)

    def _handed_over(self, stats: TransferStats) -> None:
        self._transfer.observe(stats.transfer_seconds)
        self._exposed.observe(stats.handoff_seconds)

    # Engine thread.

    def _on_step(self, plan: StepPlan, out: StepOutput, seconds: float) -> None:
        self._steps[plan.kind].observe(seconds)
        self._sequences.observe(plan.num_sequences)
        self._tokens.observe(plan.num_tokens)
        self._computed.inc(plan.num_tokens)
        self._launches[out.graph].inc()
