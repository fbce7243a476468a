"""The signals for the policy: measured over the last seconds from the totals that members report. No I/O.

Routers and workers report totals since their start, so a lost report loses nothing, and a member that starts again is
recognized by its incarnation. A total's growth over the window, divided by the window, is a rate.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

from kvrelay.rpc.identity import WorkerId

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


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's figures. Totals are since its start."""

    id: WorkerId
    role: PoolRole
    ready: bool
    """Whether it takes requests."""
    movable: bool = True
    """Whether its process can take the other role."""
    requests: int = 0
    """Number of requests that wait and run there."""
    slots: int = 0
    """Number of requests that it could run beside each other; fewer where their KV needs all blocks."""
    pending_tokens: int = 0
    computed_tokens: int = 0
    """Total of tokens that it has computed."""
    steps: int = 0
    """Total of steps."""
    step_seconds: float = 0.0
    """Total of the seconds that steps took."""


@dataclass(frozen=True, slots=True)
class RouterReport:
    """A router's figures. Totals are since its start."""

    id: WorkerId
    requests: int = 0
    """Total of requests that were accepted."""
    prompt_tokens: int = 0
    """Total of the tokens of their prompts."""
    cached_tokens: int = 0
    """Total of prompt tokens found in prefix caches."""
    completion_tokens: int = 0
    """Total of completion tokens of the requests that have ended."""
    first_tokens: int = 0
    """Total of first tokens sent."""
    ttft_attained: int = 0
    """Total of first tokens within their target."""
    unqueued_seconds: float = 0.0
    """Total of seconds from arrival to first token, without the time in queues."""
    streams: int = 0
    """Total of requests with two tokens or more that have ended."""
    tpot_attained: int = 0
    """Total of streams within their target."""
    young_tokens: int = 0
    """Tokens, so far, of the requests whose first token was sent within the last WINDOW_SECONDS."""
    young_ended: int = 0
    """Number of these young requests that have ended already."""
    queued_prompts: int = 0
    """Requests that wait now for prefill workers, in the router."""
    queued_streams: int = 0
    """Requests that wait now for capacity on decode workers, in the router."""
    queued_tokens: int = 0
    """Prompt tokens of the requests in both queues."""


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

    id: WorkerId
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

    def observe(self, workers: Iterable[WorkerReport], routers: Iterable[RouterReport], now: float) -> Signals:
        """The signals at `now`, in seconds on a clock that never goes back."""
        workers, routers = list(workers), list(routers)
        elapsed = 0.0 if self._last is None else max(0.0, now - self._last)
        self._last = now
        grown = self._grown(workers, routers, elapsed)
        self._growth.append((now, grown))
        while self._growth[0][0] <= now - self.window:
            self._growth.popleft()
        return self._signals(workers, routers, now)

    def _grown(self, workers: list[WorkerReport], routers: list[RouterReport], elapsed: float) -> dict[str, float]:
        """The growth of each total since the last tick, summed over the members."""
        grown: dict[str, float] = {"elapsed": elapsed}
        samples: dict[PoolRole, list[tuple[int, int, float]]] = {"prefill": [], "decode": []}
        for worker in workers:
            new = self._new(worker.id, worker, _WORKER_TOTALS)
            if (steps := int(new["steps"])) > 0 and new["step_seconds"] > 0.0:
                samples[worker.role].append((steps, int(new["computed_tokens"]), new["step_seconds"]))
            if worker.role == "decode":
                grown["decoded"] = grown.get("decoded", 0.0) + new["computed_tokens"]
        for role, taken in samples.items():
            if taken:  # what an idle role's steps cost stays known
                self._fits[role].fade(max(0.0, 1 - elapsed / FORGET_SECONDS))
            for sample in taken:
                self._fits[role].add(*sample)
        for router in routers:
            for name, amount in self._new(router.id, router, _ROUTER_TOTALS).items():
                grown[name] = grown.get(name, 0.0) + amount
        present = {worker.id.name for worker in workers} | {router.id.name for router in routers}
        self._seen = {name: totals for name, totals in self._seen.items() if name in present}
        return grown

    def _new(self, member: WorkerId, report: WorkerReport | RouterReport, names: tuple[str, ...]) -> dict[str, float]:
        """A member's growth since its last report; nothing with its first one, whose totals may be old."""
        totals = {name: float(getattr(report, name)) for name in names}
        before = self._seen.get(member.name)
        self._seen[member.name] = _Totals(member, totals)
        if before is None or before.id != member:
            return dict.fromkeys(names, 0.0)
        return {name: max(0.0, value - before.last[name]) for name, value in totals.items()}

    def _signals(self, workers: list[WorkerReport], routers: list[RouterReport], now: float) -> Signals:
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
        prefills = [worker for worker in workers if worker.role == "prefill" and worker.ready]
        decodes = [worker for worker in workers if worker.role == "decode" and worker.ready]
        first, streams = total["first_tokens"], total["streams"]
        return Signals(
            prefill=len(prefills),
            decode=len(decodes),
            arrivals=requests / seconds if seconds else 0.0,
            arrivals_counted=int(requests),
            prompt_tokens=self._prompt,
            backlog_tokens=sum(worker.pending_tokens for worker in workers if worker.role == "prefill")
            + sum(router.queued_tokens for router in routers),
            chunk_tokens=self._fits["prefill"].largest,
            prefill_step=self._fits["prefill"].cost(),
            streams=sum(worker.requests for worker in workers if worker.role == "decode"),
            queued_streams=sum(router.queued_streams for router in routers),
            stream_tokens=self._stream_tokens,
            young_tokens=self._young_tokens(routers, total),
            stream_slots=sum(worker.slots for worker in decodes) / len(decodes) if decodes else 0.0,
            decode_step=self._fits["decode"].cost(),
            unqueued_seconds=self._unqueued,
            ttft_attained=total["ttft_attained"] / first if first else None,
            tpot_attained=total["tpot_attained"] / streams if streams else None,
        )

    def _young_tokens(self, routers: list[RouterReport], total: Mapping[str, float]) -> float:
        """The old ones tell little: long requests that began before a change of the traffic end long after it."""
        if total["streams"]:
            self._ended_tokens = total["completion_tokens"] / total["streams"]
        tokens, ended = sum(each.young_tokens for each in routers), sum(each.young_ended for each in routers)
        return max(1.0, (tokens + PRIOR * self._ended_tokens) / (ended + PRIOR))


_WORKER_TOTALS = ("computed_tokens", "steps", "step_seconds")
_ROUTER_TOTALS = tuple(
    entry.name
    for entry in fields(RouterReport)
    if entry.name != "id" and not entry.name.startswith(("queued_", "young_"))
)
