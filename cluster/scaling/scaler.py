"""Fits the workers' roles and their number to the traffic: asks the policy, and follows what it decides.

heartbeats --> membership --> reports --> Meter --> signals --> Policy --> decision --> fleet
                                                                             '--> log, metrics, `kvrelay status`
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Literal, get_args

from kvrelay.cluster.fleet.desired import Refused
from kvrelay.cluster.fleet.fleet import Fleet
from kvrelay.cluster.membership.membership import Membership
from kvrelay.cluster.scaling.config import ScalingConfig
from kvrelay.cluster.scaling.forecast import Split
from kvrelay.cluster.scaling.policy import Decision, Policy
from kvrelay.cluster.scaling.signals import Meter, Signals
from kvrelay.internal.v1.supervisor_pb2 import (
    ROLE_ROUTER,
    MemberStatus,
    PoolSize,
    Scaling,
    ScalingDecision,
)
from kvrelay.rpc.identity import ROLES, MemberRole, WorkerId

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
"""Seconds between two decisions, as between two reports of members."""
KEPT = 20
"""Number of decisions that `kvrelay status` shows."""

DecisionKind = Literal["roles", "workers", "refused"]
DECISION_KINDS: tuple[DecisionKind, ...] = get_args(DecisionKind)


class Scaler:
    """Scales the workers of one supervisor. It only measures if it is off or the supervisor starts no members."""

    def __init__(
        self,
        config: Callable[[], ScalingConfig],
        membership: Membership,
        fleet: Fleet | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`config`: the present options; they may change."""
        self._present = config
        self._config = config()
        self._membership = membership
        self._fleet = fleet
        self._clock = clock
        self._meter, self._policy = Meter(), Policy(self._config)
        self._signals: Signals | None = None
        self._decisions: deque[ScalingDecision] = deque(maxlen=KEPT)
        self.counts: Counter[DecisionKind] = Counter()
        """Decisions so far, by kind."""
        self._queued = Scaling()
        """Figures of the queues."""
        self._queue_seconds: dict[WorkerId, tuple[float, float]] = {}
        """Seconds in the queue for prefill and in the queue for decode, as each router last reported them."""

    async def run(self) -> None:
        """Decides for ever. After an error nothing is changed: the supervisor serves without a scaler."""
        failure = ""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                await self.tick()
            except Exception as error:
                if failure != (failure := repr(error)):
                    logger.exception("the scaler can't decide")

    async def tick(self) -> None:
        """Looks at the cluster once, and changes it if the policy says so."""
        self._reconfigure()
        statuses = self._membership.statuses()
        self._note_queues([status for status in statuses if status.member.role == ROLE_ROUTER])
        now = self._clock()
        signals = self._signals = self._meter.observe(statuses, now)
        fleet = self._fleet
        if fleet is None or fleet.desired.rolling:
            return
        desired = Split(fleet.desired.count("prefill"), fleet.desired.count("decode"))
        decision = self._policy.decide(signals, desired, statuses, now)
        if decision is not None and self._config.enabled:
            await self._follow(fleet, decision)

    def _reconfigure(self) -> None:
        """Takes options that have changed."""
        config = self._present()
        if config != self._config:
            logger.info("scaling has other options", extra={"options": asdict(config)})
            self._config = self._policy.config = config

    def status(self) -> Scaling:
        """The state of scaling, for `kvrelay status` and the metrics."""
        scaling, signals, outlook = Scaling(), self._signals, self._policy.outlook
        scaling.CopyFrom(self._queued)
        scaling.enabled = self._config.enabled
        scaling.ttft_target_seconds = self._config.ttft_target_seconds
        scaling.tpot_target_seconds = self._config.tpot_target_seconds
        if signals is not None and signals.ttft_attained is not None:
            scaling.ttft_attained = signals.ttft_attained
        if signals is not None and signals.tpot_attained is not None:
            scaling.tpot_attained = signals.tpot_attained
        if outlook is not None:
            scaling.prefill_pressure, scaling.decode_pressure = outlook.now.prefill, outlook.now.decode
        scaling.decisions.extend(self._decisions)
        return scaling

    async def _follow(self, fleet: Fleet, decision: Decision) -> None:
        noted = ScalingDecision(time=time.time(), reason=decision.reason)
        counts: dict[MemberRole, int] = {role: count for role, count in decision.scale.items()}  # noqa: C416  # the key's type is wider
        noted.pools.extend(PoolSize(role=ROLES[role], count=count) for role, count in counts.items())
        try:
            for worker, role in decision.moves.items():
                await fleet.set_role(worker, role)
                noted.moves[worker] = ROLES[role]
            if counts:
                await fleet.scale(counts)
        except Refused as refused:
            noted.refused = str(refused)
        self._decisions.append(noted)
        self.counts["refused" if noted.refused else "workers" if counts else "roles"] += 1
        fields = {"reason": decision.reason, "moves": decision.moves, "workers": decision.scale}
        if noted.refused:
            logger.warning("scaling was refused", extra=fields | {"refused": noted.refused})
        else:
            logger.info("scaling", extra=fields)

    def _note_queues(self, routers: Sequence[MemberStatus]) -> None:
        queued, before, now = self._queued, self._queue_seconds, {}
        for status in routers:
            router, traffic = WorkerId(status.member.name, status.member.incarnation), status.load.traffic
            now[router] = traffic.prefill_queue_seconds, traffic.decode_queue_seconds
            prefill, decode = before.get(router, now[router])
            queued.prefill_queue_seconds += max(0.0, now[router][0] - prefill)
            queued.decode_queue_seconds += max(0.0, now[router][1] - decode)
        self._queue_seconds = now
        queued.prefill_queue = sum(status.load.traffic.queued_prompts for status in routers)
        queued.decode_queue = sum(status.load.traffic.queued_streams for status in routers)
