"""The signals for the policy: measured over the last seconds from the totals that members report. No I/O.

Reports are the supervisor's own (`MemberStatus`). Routers and workers report totals since their start, so a lost report
loses nothing, and a member that starts again is recognized by its incarnation. A total's growth over the window,
divided by the window, is a rate.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

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

WINDOW_SECONDS = 4.0
"""Seconds over which rates are taken: enough to average bursts, few enough to see a change of the traffic soon."""
FORGET_SECONDS = 60.0
"""Seconds after which a sample of a step's cost weighs 1/e."""
MIN_SPREAD = 0.05
"""Relative spread of the samples above which a step's cost is split into a fixed part and a part for each token."""
FIXED_SHARE = 0.5
"""Share of a step's cost that is assumed to be fixed until the samples spread enough."""
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


class StepCost(NamedTuple):
    """Seconds of a step by the tokens that it computes: `fixed + each * tokens`."""

    fixed: float
    each: float

    def seconds(self, tokens: float) -> float:
        return self.fixed + self.each * tokens


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
    """Requests of which that is the mean."""
    prompt_tokens: float
    """Tokens to compute of one prompt, those in prefix caches excluded."""
    backlog_tokens: float
    """Tokens of prompts that wait or are being computed."""
    chunk_tokens: float
    """Tokens in a full step of a prefill worker."""
    prefill_step: StepCost | None
    """Cost of a prefill step; None before it is known, as for the other two."""
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
    unqueued_seconds: float
    """Seconds of a request's time to its first token that aren't queueing."""
    ttft_attained: float | None = None
    """Share of the last first tokens; None without any."""
    tpot_attained: float | None = None

    @property
    def complete(self) -> bool:
        """Whether enough is known for a forecast."""
        return self.prefill_step is not None and self.decode_step is not None and self.stream_tokens is not None


@dataclass(slots=True)
class _Fit:
    """Weighted least squares of a step's seconds against its tokens, in which old samples fade."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    largest: float = 0.0
    """Largest number of tokens in a step."""

    def fade(self, keep: float) -> None:
        self.weight *= keep
        self.x *= keep
        self.y *= keep
        self.xx *= keep
        self.xy *= keep

    def add(self, steps: int, tokens: int, seconds: float) -> None:
        """Takes so many steps with their sums."""
        x, y = tokens / steps, seconds / steps
        self.weight += steps
        self.x += steps * x
        self.y += steps * y
        self.xx += steps * x * x
        self.xy += steps * x * y
        self.largest = max(self.largest, x)

    def cost(self) -> StepCost | None:
        """The cost of a step; None without samples."""
        if self.weight <= 0.0 or self.x <= 0.0:
            return None
        x, y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - x * x
        if spread < (MIN_SPREAD * x) ** 2:
            return StepCost(FIXED_SHARE * y, (1 - FIXED_SHARE) * y / x)
        each = min(max(0.0, (self.xy / self.weight - x * y) / spread), y / x)
        return StepCost(y - each * x, each)


@dataclass(slots=True)
class _Totals:
    """The growth of one member's totals, of one incarnation after another."""

    incarnation: str
    last: Mapping[str, float]


@dataclass(slots=True)
class Meter:
    """Turns reports into signals. Call `observe` at each tick with all present reports."""

    window: float = WINDOW_SECONDS
    _growth: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)
    """(time, what has grown by how much) of the ticks in the window."""
    _seen: dict[str, _Totals] = field(default_factory=dict)
    _fits: dict[PoolRole, _Fit] = field(default_factory=lambda: {"prefill": _Fit(), "decode": _Fit()})
    _last: float | None = None
    _prompt: float = 0.0
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
        while self._growth[0][0] <= now - self.window:
            self._growth.popleft()
        return self._signals(workers, [status.load.traffic for status in routers])

    def _grown(self, workers: list[MemberStatus], routers: list[MemberStatus], elapsed: float) -> dict[str, float]:
        """The growth of each total since the last tick, summed over the members."""
        grown: dict[str, float] = {"elapsed": elapsed}
        samples: dict[PoolRole, list[tuple[int, int, float]]] = {"prefill": [], "decode": []}
        for worker in workers:
            new = self._new(worker.member, worker.load, _WORKER_TOTALS)
            if (steps := int(new["steps"])) > 0 and new["step_seconds"] > 0.0:
                samples[POOLS[worker.member.role]].append((steps, int(new["computed_tokens"]), new["step_seconds"]))
            if worker.member.role == ROLE_DECODE:
                grown["decoded"] = grown.get("decoded", 0.0) + new["computed_tokens"]
        for role, taken in samples.items():
            if taken:  # what an idle role's steps cost stays known
                self._fits[role].fade(max(0.0, 1 - elapsed / FORGET_SECONDS))
            for sample in taken:
                self._fits[role].add(*sample)
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
        total = {name: sum(grown.get(name, 0.0) for _, grown in self._growth) for name in (*_ROUTER_TOTALS, "decoded")}
        seconds = sum(grown["elapsed"] for _, grown in self._growth)
        requests, ended = total["requests"], total["streams"]
        if requests:
            cached = min(total["cached_tokens"], 0.95 * total["prompt_tokens"])
            self._prompt = (total["prompt_tokens"] - cached) / requests
        if total["first_tokens"]:
            self._unqueued = total["unqueued_seconds"] / total["first_tokens"]
        if total["decoded"]:
            # Tokens generated per request ended: if none has ended yet, requests are at least that long.
            self._stream_tokens = total["decoded"] / max(ended, 1.0)
        ready = [worker for worker in workers if worker.member.state == MEMBER_STATE_READY]
        slots = [slots_of(worker.load) for worker in ready if worker.member.role == ROLE_DECODE]
        of_prefill = [worker.load for worker in workers if worker.member.role == ROLE_PREFILL]
        first, streams = total["first_tokens"], total["streams"]
        return Signals(
            prefill=len(ready) - len(slots),
            decode=len(slots),
            arrivals=requests / seconds if seconds else 0.0,
            arrivals_counted=int(requests),
            prompt_tokens=self._prompt,
            backlog_tokens=sum(load.pending_tokens for load in of_prefill)
            + sum(router.queued_tokens for router in routers),
            chunk_tokens=self._fits["prefill"].largest,
            prefill_step=self._fits["prefill"].cost(),
            streams=sum(requests_of(worker.load) for worker in workers if worker.member.role == ROLE_DECODE),
            queued_streams=sum(router.queued_streams for router in routers),
            stream_tokens=self._stream_tokens,
            young_tokens=self._young_tokens(routers, total),
            stream_slots=sum(slots) / len(slots) if slots else 0.0,
            decode_step=self._fits["decode"].cost(),
            unqueued_seconds=self._unqueued,
            ttft_attained=total["ttft_attained"] / first if first else None,
            tpot_attained=total["tpot_attained"] / streams if streams else None,
        )

    def _young_tokens(self, routers: list[Traffic], total: Mapping[str, float]) -> float:
        """The old ones tell little: long requests that began before a change of the traffic end long after it."""
        if total["streams"]:
            self._ended_tokens = total["completion_tokens"] / total["streams"]
        tokens, ended = sum(each.young_tokens for each in routers), sum(each.young_ended for each in routers)
        return max(1.0, (tokens + PRIOR * self._ended_tokens) / (ended + PRIOR))


_WORKER_TOTALS = ("computed_tokens", "steps", "step_seconds")
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
