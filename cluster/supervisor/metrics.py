"""The metrics that the supervisor records, and the targets that Prometheus finds through it."""

from collections import Counter
from typing import Any

from kvrelay.cluster.membership.membership import Membership
from kvrelay.cluster.scaling.scaler import DECISION_KINDS, Scaler
from kvrelay.internal.v1.supervisor_pb2 import ROLE_ROUTER
from kvrelay.rpc.identity import ROLES, state_name
from kvrelay.rpc.metrics import families
from kvrelay.rpc.metrics.metric_set import MetricSet


class SupervisorMetrics:
    """Follows a membership, and what decides about it."""

    def __init__(self, membership: Membership, scaler: Scaler) -> None:
        self.metrics = metrics = MetricSet("supervisor")
        self._membership = membership
        self._scaler = scaler
        self._decided = {kind: metrics.total(families.SCALING_DECISIONS, kind) for kind in DECISION_KINDS}
        self._queued = {role: metrics.total(families.POOL_QUEUE_SECONDS, role) for role in families.POOL.values}
        self._ages: set[str] = set()
        counts = membership.counts
        self._by_role = [
            (metrics.total(family, role), counted, number)
            for family, counted in (
                (families.DEATHS, counts.deaths),
                (families.REPLACEMENTS, counts.replacements),
                (families.DRAINS, counts.drains),
                (families.ROLE_CHANGES, counts.role_changes),
            )
            for role, number in ROLES.items()
        ]
        self._fences = metrics.total(families.INCARNATION_FENCES)
        metrics.before_scrape(self._update)

    def targets(self, own: str) -> list[dict[str, Any]]:
        """Every member that serves metrics, as Prometheus' HTTP service discovery reads it.

        Args:
            own: host:port of the supervisor's metrics.
        """
        found = [_target(own, "supervisor", "supervisor")]
        for member in self._membership.members():
            address = member.metrics_address or member.http_address
            if address:
                part = "router" if member.role == ROLE_ROUTER else "worker"
                found.append(_target(address, part, member.name))
        return found

    def _update(self) -> None:
        metrics, membership = self.metrics, self._membership
        for total, counted, role in self._by_role:
            total.set(counted[role])
        self._fences.set(membership.counts.fences.total())
        metrics.gauge(families.READY).set(membership.ready)
        statuses = membership.statuses()
        held = Counter((status.member.role, state_name(status.member.state)) for status in statuses)
        for name, number in ROLES.items():
            for state in families.STATES:
                metrics.gauge(families.MEMBERS, name, state).set(held[number, state])
        for gone in self._ages - {status.member.name for status in statuses}:
            metrics.forget(families.HEARTBEAT_AGE, gone)
        self._ages = {status.member.name for status in statuses}
        for status in statuses:
            metrics.gauge(families.HEARTBEAT_AGE, status.member.name).set(status.heartbeat_age_seconds)
        self._update_scaling()

    def _update_scaling(self) -> None:
        metrics, scaling = self.metrics, self._scaler.status()
        for kind, total in self._decided.items():
            total.set(self._scaler.counts[kind])
        self._queued["prefill"].set(scaling.prefill_queue_seconds)
        self._queued["decode"].set(scaling.decode_queue_seconds)
        metrics.gauge(families.PRESSURE, "prefill").set(scaling.prefill_pressure)
        metrics.gauge(families.PRESSURE, "decode").set(scaling.decode_pressure)
        ttft = scaling.ttft_attained if scaling.HasField("ttft_attained") else 1.0
        tpot = scaling.tpot_attained if scaling.HasField("tpot_attained") else 1.0
        metrics.gauge(families.ATTAINED, "ttft").set(ttft)
        metrics.gauge(families.ATTAINED, "tpot").set(tpot)


def _target(address: str, part: str, name: str) -> dict[str, Any]:
    return {"targets": [address], "labels": {"part": part, "member": name}}
