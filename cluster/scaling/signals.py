"""The signals for the policy: measured over the last seconds from the totals that members report. No I/O.

Reports are the supervisor's own (`MemberStatus`). Routers and workers report totals since their start, so a lost report
loses nothing, and a member that starts again is recognized by its incarnation. A total's growth over the window,
divided by the window, is a rate. Workers also report the costs of their steps, which they fit themselves
(`costs/step.py`).
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from kvrelay.costs.step import StepCost
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_READY,
    ROLE_DECODE,
    ROLE_PREFILL,
    ROLE_ROUTER,
    Member,
    MemberStatus,
    Role,
)
from kvrelay.internal.v1.worker_pb2 import Load, Traffic
from kvrelay.rpc.costs import read_costs

WINDOW_SECONDS = 4.0
"""Seconds over which rates are taken: enough to average bursts, few enough to see a change of the traffic soon."""
PRIOR = 2.0
"""Number of imagined young requests, as long as those that have ended; they count while few have ended."""

PoolRole = Literal["prefill", "decode"]


POOLS: dict[Role, PoolRole] = {ROLE_PREFILL: "prefill", ROLE_DECODE: "decode"}


def requests_of(load: Load) -> int:
    """Requests that wait and run on a worker, or are on their way to it."""
    return load.requests.waiting + load.requests.running + load.promised.requests


def slots_of(load: Load) -> int:
    """Requests that a worker could run beside each other; fewer where their KV needs all blocks."""
    slots = load.requests.running + load.requests.free_slots
    if load.requests.running and load.blocks.held:
        slots = min(slots, load.requests.running * load.blocks.total // load.blocks.held)
    return slots


@dataclass(frozen=True, slots=True)
class Signals:
    """The cluster as the policy sees it at one moment."""

    prefill: int
    """Prefill workers that take requests."""
    decode: int
    """Decode workers that take requests."""
    arrivals: float
    """Rate of arrivals, in requests per second."""
    arrivals_counted: int
    """Number of arrivals that the rate was computed from."""
    prompt_tokens: float
    """Tokens of one prompt that prefill workers compute, those in prefix caches excluded."""
    cached_tokens: float
    """Tokens of one prompt that are in prefix caches."""
    backlog_tokens: float
    """Tokens of prompts that wait or are being computed."""
    chunk_tokens: float
    """Tokens in a full step of a prefill worker."""
    prefill_step: StepCost | None
    """Mean costs of the prefill workers' steps; None before they are known, as for the other two."""
    streams: float
    """Requests on decode workers, or on their way there."""
    queued_streams: float
    """Requests that wait for capacity on decode workers in the routers."""
    stream_tokens: float | None
    """Tokens that decode workers generate for one ended request."""
    young_tokens: float
    """Tokens that requests are expected to have that begin now."""
    stream_slots: float
    """Requests that one decode worker can have."""
    decode_step: StepCost | None
    """Mean costs of the decode workers' steps."""
    context_tokens: float
    """Tokens of one stream's context."""
    in_place_tokens: float
    """Tokens of prompts that decode workers compute for each token that they generate."""
    unqueued_seconds: float
    """Seconds of a request's time to its first token that aren't queueing."""
    ttft_attained: float | None = None
    """Share of the latest first tokens that met their target; None if there were none."""
    tpot_attained: float | None = None

    @property
    def complete(self) -> bool:
        """Whether enough is known for a forecast."""
        return self.prefill_step is not None and self.decode_step is not None and self.stream_tokens is not None


@dataclass(slots=True)
class _Totals:
    """The totals that one member has reported last."""

    incarnation: str
    last: Mapping[str, float]


@dataclass(slots=True)
class Meter:
    """Turns reports into signals. Call `observe` at each tick with all present reports."""

    _growth: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)
    """(time, what has grown by how much) of the ticks in the window."""
    _seen: dict[str, _Totals] = field(default_factory=dict)
    _last: float | None = None
    _prompt: float = 0.0
    _cached: float = 0.0
    _on_prefill: float = 1.0
    """Share of the tokens of prompts that prefill workers compute."""
    _in_place: float = 0.0
    _unqueued: float = 0.0
    _stream_tokens: float | None = None
    _ended_tokens: float = 0.0

    def observe(self, statuses: Iterable[MemberStatus], now: float) -> Signals:
        """The signals at `now`, in seconds on a clock that never goes back."""
        statuses = list(statuses)
        workers = [status for status in statuses if status.member.role in POOLS]
        routers = [status for status in statuses if status.member.role == ROLE_ROUTER]
        elapsed = 0.0 if self._last is None else max(0.0, now - self._last)
        self._last = now
        grown = self._grown(workers, routers, elapsed)
        self._growth.append((now, grown))
        while self._growth[0][0] <= now - WINDOW_SECONDS:
            self._growth.popleft()
        return self._signals(workers, [status.load.traffic for status in routers])

    def _grown(self, workers: list[MemberStatus], routers: list[MemberStatus], elapsed: float) -> dict[str, float]:
        """The growth of each total since the last tick, summed over the members."""
        grown: dict[str, float] = {"elapsed": elapsed}
        for worker in workers:
            new, role = self._new(worker.member, worker.load, _WORKER_TOTALS), POOLS[worker.member.role]
            prompts = f"{role} prompts"
            grown[prompts] = grown.get(prompts, 0.0) + new["prompt_tokens"]
            if role == "decode":
                grown["decoded"] = grown.get("decoded", 0.0) + new["computed_tokens"] - new["prompt_tokens"]
        for router in routers:
            for name, amount in self._new(router.member, router.load.traffic, _ROUTER_TOTALS).items():
                grown[name] = grown.get(name, 0.0) + amount
        present = {status.member.name for status in (*workers, *routers)}
        self._seen = {name: totals for name, totals in self._seen.items() if name in present}
        return grown

    def _new(self, member: Member, report: Load | Traffic, names: tuple[str, ...]) -> dict[str, float]:
        """A member's growth since its last report; nothing with its first one, whose totals may be old."""
        totals = {name: float(getattr(report, name)) for name in names}
        before = self._seen.get(member.name)
        self._seen[member.name] = _Totals(member.incarnation, totals)
        if before is None or before.incarnation != member.incarnation:
            return dict.fromkeys(names, 0.0)
        return {name: max(0.0, value - before.last[name]) for name, value in totals.items()}

    def _signals(self, workers: list[MemberStatus], routers: list[Traffic]) -> Signals:
        total = {name: sum(grown.get(name, 0.0) for _, grown in self._growth) for name in (*_ROUTER_TOTALS, *_COMPUTED)}
        seconds = sum(grown["elapsed"] for _, grown in self._growth)
        requests, decoded, in_place = total["requests"], total["decoded"], total["decode prompts"]
        if requests:
            self._cached = min(total["cached_tokens"], 0.95 * total["prompt_tokens"]) / requests
            self._prompt = total["prompt_tokens"] / requests - self._cached
        if computed := in_place + total["prefill prompts"]:
            self._on_prefill = total["prefill prompts"] / computed
        if total["first_tokens"]:
            self._unqueued = total["unqueued_seconds"] / total["first_tokens"]
        if decoded:
            # Tokens generated per request ended: if none has ended yet, requests are at least that long.
            self._stream_tokens = decoded / max(total["streams"], 1.0)
            self._in_place = in_place / decoded
        ready = [worker for worker in workers if worker.member.state == MEMBER_STATE_READY]
        slots = [slots_of(worker.load) for worker in ready if worker.member.role == ROLE_DECODE]
        of_prefill, of_decode = (
            [worker.load for worker in workers if worker.member.role == role] for role in (ROLE_PREFILL, ROLE_DECODE)
        )
        chunks = [load.costs.chunk for load in of_prefill if load.HasField("costs")]
        first, streams = total["first_tokens"], total["streams"]
        return Signals(
            prefill=len(ready) - len(slots),
            decode=len(slots),
            arrivals=requests / seconds if seconds else 0.0,
            arrivals_counted=int(requests),
            prompt_tokens=self._prompt * self._on_prefill,
            cached_tokens=self._cached,
            backlog_tokens=sum(load.pending_tokens for load in of_prefill)
            + sum(router.queued_tokens for router in routers),
            chunk_tokens=sum(chunks) / max(1, len(chunks)),
            prefill_step=_mean_cost(of_prefill),
            streams=sum(requests_of(load) for load in of_decode),
            queued_streams=sum(router.queued_streams for router in routers),
            stream_tokens=self._stream_tokens,
            young_tokens=self._young_tokens(routers, total),
            stream_slots=sum(slots) / len(slots) if slots else 0.0,
            decode_step=_mean_cost(of_decode),
            context_tokens=self._prompt + self._cached + (self._stream_tokens or 0.0) / 2,
            in_place_tokens=self._in_place,
            unqueued_seconds=self._unqueued,
            ttft_attained=total["ttft_attained"] / first if first else None,
            tpot_attained=total["tpot_attained"] / streams if streams else None,
        )

    def _young_tokens(self, routers: list[Traffic], total: Mapping[str, float]) -> float:
        """Expected tokens of requests that begin now. Old requests tell little: long ones that began before a change of
        the traffic end long after it."""
        if total["streams"]:
            self._ended_tokens = total["completion_tokens"] / total["streams"]
        tokens, ended = sum(each.young_tokens for each in routers), sum(each.young_ended for each in routers)
        return max(1.0, (tokens + PRIOR * self._ended_tokens) / (ended + PRIOR))


def _mean_cost(loads: Iterable[Load]) -> StepCost | None:
    """The mean of the costs that workers report; None if none does yet."""
    costs = [read_costs(load.costs).step for load in loads if load.HasField("costs")]
    if not costs:
        return None
    names = [each.name for each in fields(StepCost)]
    return StepCost(**{name: sum(getattr(cost, name) for cost in costs) / len(costs) for name in names})


_WORKER_TOTALS = ("computed_tokens", "prompt_tokens")
_COMPUTED = ("prefill prompts", "decode prompts", "decoded")
"""Tokens that workers have computed: of prompts, by role, and others on decode workers."""
_ROUTER_TOTALS = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "first_tokens",
    "ttft_attained",
    "unqueued_seconds",
    "streams",
    "tpot_attained",
)
