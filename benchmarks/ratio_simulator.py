"""A simulated cluster for the policy that changes workers' roles: engine steps as events, everything else as it is.

The policy, what it measures and forecasts, and the router's placement are the product's own. A step takes what the cost
table says; a prompt's KV arrives on decode some time after its last step; a worker that changes its role serves nobody
for a while, and what it had begins again elsewhere with the tokens that it has. Ten minutes of eight workers take some
seconds.
"""

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvrelay.cluster.scaling.config import ScalingConfig
from kvrelay.cluster.scaling.forecast import Split
from kvrelay.cluster.scaling.policy import Decision, Policy
from kvrelay.cluster.scaling.signals import WINDOW_SECONDS, Meter, PoolRole
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_READY,
    MEMBER_STATE_STARTING,
    ROLE_DECODE,
    ROLE_PREFILL,
    ROLE_ROUTER,
    Member,
    MemberStatus,
)
from kvrelay.internal.v1.worker_pb2 import Load, Promised, Requests, Traffic
from kvrelay.router.placing.placement import DecodeCapacity, Demand, LeastWork, Placement, WorkerView
from kvrelay.router.placing.prefixes import PrefixIndex
from kvrelay.rpc.identity import ROLES, WorkerId

BEAT_SECONDS = 0.5
BLOCK = 16
"""Tokens in a block of KV."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs of a step on one worker, in seconds, and sizes of the worker."""

    prefill_fixed: float
    """Seconds of any prefill step."""
    prefill_token: float
    prefill_square: float
    """Seconds for each square of a prompt's tokens in the step."""
    decode_fixed: float
    decode_context: float
    """Seconds for each token of context."""
    decode_stream: float
    kv_tokens: int
    """Size of a worker's KV pool in tokens."""
    max_streams: int
    """Streams that one worker runs."""
    max_chunk: int = 512
    """Tokens in one step."""
    handoff: float = 0.05
    """Seconds from a prompt's last step to its stream on decode."""
    switch: float = 2.0
    """Seconds that a worker takes to change its role."""

    def prefill(self, lengths: Sequence[int]) -> float:
        """Seconds of a step with these chunks."""
        squares = sum(length * length for length in lengths)
        return self.prefill_fixed + self.prefill_token * sum(lengths) + self.prefill_square * squares

    def decode(self, streams: int, context: int) -> float:
        """Seconds of a step with so many streams, and tokens of all their contexts."""
        return self.decode_fixed + self.decode_context * context + self.decode_stream * streams


A100_OPT_66B = CostTable(
    # DistServe (OSDI 2024), simdistserve/estimators/profile_data at commit 82831f16, Apache-2.0: OPT-66B on two
    # A100-80GB, its own engine; decode with fewer than 95 streams; 11,600 tokens of KV.
    prefill_fixed=43.05881e-3,
    prefill_token=0.27422929e-3,
    prefill_square=2.2478e-8,
    decode_fixed=48.288015e-3,
    decode_context=0.94243e-6,
    decode_stream=0.1275502e-3,
    kv_tokens=11_600,
    max_streams=16,
)


@dataclass(frozen=True, slots=True)
class Phase:
    """Traffic of one kind: Poisson arrivals, lengths evenly distributed within a quarter of their means."""

    seconds: float
    rate: float
    """Requests a second."""
    prompt: int
    """Tokens of a prompt on average; `completion` is in tokens, too."""
    completion: int


@dataclass(slots=True, eq=False)
class Job:
    """One request."""

    arrival: float
    prompt: int
    completion: int
    tokens: int = 0
    """Tokens generated so far."""
    computed: int = 0
    """Tokens of the prompt and of earlier output that its prefill worker has computed."""
    queued: float = 0.0
    """Seconds in queues before its first token."""
    waits_since: float = 0.0
    first: float | None = None
    last: float | None = None
    decode: WorkerId | None = None
    attempt: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of KV that it needs for its next token."""
        return -(-(self.prompt + self.tokens + 1) // BLOCK)

    @property
    def ttft(self) -> float:
        return math.inf if self.first is None else self.first - self.arrival

    @property
    def tpot(self) -> float:
        if self.first is None or self.last is None:
            return math.inf
        return (self.last - self.first) / max(1, self.completion - 1)

    def good(self, config: ScalingConfig) -> bool:
        """Whether it has ended within both targets."""
        return self.ttft <= config.ttft_target_seconds and self.tpot <= config.tpot_target_seconds


def goodput(jobs: Sequence[Job], config: ScalingConfig, seconds: float) -> float:
    """Requests a second that ended within both targets."""
    return sum(job.good(config) for job in jobs) / seconds


def attained(jobs: Sequence[Job], config: ScalingConfig, begin: float, end: float) -> float:
    """Share of the requests that arrived in a time and met both targets; 1 if none arrived."""
    found = [job.good(config) for job in jobs if begin <= job.arrival < end]
    return sum(found) / len(found) if found else 1.0


def traffic(phases: Sequence[Phase], seed: int = 0) -> list[Job]:
    """The requests of phases that follow one another."""
    rng, jobs, begin = random.Random(seed), [], 0.0
    for phase in phases:
        at = begin
        while (at := at + rng.expovariate(phase.rate)) < begin + phase.seconds:
            lengths = (max(2, round(mean * rng.uniform(0.75, 1.25))) for mean in (phase.prompt, phase.completion))
            jobs.append(Job(at, *lengths))
        begin += phase.seconds
    return jobs


@dataclass(slots=True, eq=False)
class Worker:
    """One worker: a queue of prompts, or running streams."""

    id: WorkerId
    role: PoolRole
    ready: bool = True
    jobs: deque[Job] = field(default_factory=deque)
    """Jobs in the order of their arrival here."""
    promised: dict[Job, None] = field(default_factory=dict)
    """Jobs whose KV is on its way to this decode worker; empty on a prefill worker."""
    stepping: bool = False
    steps: int = 0
    step_seconds: float = 0.0
    computed: int = 0

    @property
    def pending(self) -> int:
        return sum(job.prompt + job.tokens - job.computed for job in self.jobs) if self.role == "prefill" else 0

    def held(self) -> int:
        """Blocks in use on a decode worker."""
        return sum(job.blocks for job in self.jobs)


@dataclass(frozen=True, slots=True)
class Run:
    """Jobs and decisions of a simulation that has ended."""

    jobs: list[Job]
    splits: list[tuple[float, Split]]
    """Ready workers of each role at many moments."""
    decisions: list[tuple[float, Decision]]


class Simulation:
    """One run: `Simulation(...).run()`."""

    def __init__(
        self, jobs: Sequence[Job], table: CostTable, split: tuple[int, int], config: ScalingConfig, end: float
    ) -> None:
        """
        Args:
            jobs: in order of arrival.
            split: workers of each role at the start.
            config: targets, and whether the policy changes anything.
            end: when the run is over.
        """
        self._jobs = list(jobs)
        self._table = table
        self._config = config
        self._end = end
        self._policy, self._meter = Policy(config), Meter()
        self._placement = LeastWork(PrefixIndex(0), 0.25, 8192)
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._now = 0.0
        self._queue: deque[Job] = deque()
        self._fresh = itertools.count()
        self._desired = Split(*split)
        roles: list[PoolRole] = ["prefill"] * split[0] + ["decode"] * split[1]
        self._workers = {worker.id: worker for worker in map(self._worker, roles)}
        self._totals: Counter[str] = Counter()
        """Counts of the router's traffic so far, by the field's name."""
        self._unqueued = 0.0
        self._young: deque[Job] = deque()
        """Jobs that had their first token lately, in the order of these tokens."""
        self._splits: list[tuple[float, Split]] = []
        self._decisions: list[tuple[float, Decision]] = []

    def run(self) -> Run:
        """Runs to the end; what has not ended by then never does."""
        for job in self._jobs:
            self._at(job.arrival, lambda job=job: self._arrive(job))  # type: ignore[misc]  # bound at once
        self._at(BEAT_SECONDS, self._beat)
        while self._events and self._events[0][0] < self._end:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        return Run(self._jobs, self._splits, self._decisions)

    def _worker(self, role: PoolRole) -> Worker:
        return Worker(WorkerId(f"worker-{next(self._fresh)}", "0"), role)

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), happen))

    # Requests.

    def _arrive(self, job: Job) -> None:
        self._totals["requests"] += 1
        self._totals["prompt_tokens"] += job.prompt
        job.waits_since = self._now
        self._queue.append(job)
        self._place()

    def _place(self) -> None:
        """Gives the queue's first requests to workers."""
        while self._queue:
            job = self._queue[0]
            tokens = job.prompt + job.tokens
            place = self._placement.place(Demand(tokens, job.completion - job.tokens), self._views())
            if not isinstance(place, Placement) or place.decode is None or place.decode == place.prefill:
                return
            self._queue.popleft()
            prefill, decode = self._workers[place.prefill], self._workers[place.decode]
            job.decode, job.computed = decode.id, 0
            job.attempt += 1
            decode.promised[job] = None
            prefill.jobs.append(job)
            self._step(prefill)

    def _views(self) -> list[WorkerView]:
        return [
            WorkerView(
                worker.id,
                worker.role,
                worker.ready,
                pending_tokens=worker.pending,
                running=len(worker.jobs),
                kv_tokens=self._table.kv_tokens,
                capacity=self._capacity(worker) if worker.role == "decode" else None,
            )
            for worker in self._workers.values()
        ]

    def _capacity(self, worker: Worker) -> DecodeCapacity:
        total = self._table.kv_tokens // BLOCK
        promised = sum(job.blocks for job in worker.promised)
        free = max(0, total - worker.held() - len(worker.jobs))
        slots = self._table.max_streams - len(worker.jobs)
        return DecodeCapacity(BLOCK, total, free, max(0, slots), len(worker.promised), promised)

    # Steps.

    def _step(self, worker: Worker) -> None:
        """Begins a step if there is work and none runs."""
        if worker.stepping or not worker.ready or not worker.jobs:
            return
        if worker.role == "prefill":
            chunks = list(self._chunks(worker))
            seconds, tokens = self._table.prefill([count for _, count in chunks]), sum(n for _, n in chunks)
            for job, _ in chunks:
                if not job.computed and job.first is None:
                    job.queued += self._now - job.waits_since
        else:
            rows = list(itertools.islice(worker.jobs, self._table.max_streams))
            seconds = self._table.decode(len(rows), sum(job.prompt + job.tokens for job in rows))
            chunks, tokens = [(job, 1) for job in rows], len(rows)
        worker.stepping = True

        def done() -> None:
            worker.stepping = False
            worker.steps += 1
            worker.step_seconds += seconds
            worker.computed += tokens
            for job, count in chunks:
                if job in worker.jobs:
                    self._advance(worker, job, count)
            self._step(worker)
            self._place()

        self._at(self._now + seconds, done)

    def _chunks(self, worker: Worker) -> Iterator[tuple[Job, int]]:
        budget = self._table.max_chunk
        for job in worker.jobs:
            if not budget:
                return
            count = min(budget, job.prompt + job.tokens - job.computed)
            yield job, count
            budget -= count

    def _advance(self, worker: Worker, job: Job, count: int) -> None:
        if worker.role == "decode":
            self._token(worker, job)
            return
        job.computed += count
        if job.computed < job.prompt + job.tokens:
            return
        worker.jobs.remove(job)
        if job.first is None:
            job.first = self._now
            self._young.append(job)
            self._totals["first_tokens"] += 1
            self._totals["ttft_attained"] += job.ttft <= self._config.ttft_target_seconds
            self._unqueued += job.ttft - job.queued
        job.tokens += 1
        attempt = job.attempt
        self._at(self._now + self._table.handoff, lambda: self._receive(job, attempt))

    def _receive(self, job: Job, attempt: int) -> None:
        if job.attempt != attempt or job.decode is None:
            return  # it has been placed again
        decode = self._workers[job.decode]
        del decode.promised[job]
        decode.jobs.append(job)
        self._step(decode)

    def _token(self, worker: Worker, job: Job) -> None:
        job.tokens += 1
        if job.tokens >= job.completion:
            worker.jobs.remove(job)
            job.last = self._now
            self._totals["completion_tokens"] += job.tokens
            self._totals["streams"] += 1
            self._totals["tpot_attained"] += job.tpot <= self._config.tpot_target_seconds

    # Scaling.

    def _beat(self) -> None:
        workers = [self._report(worker) for worker in self._workers.values()]
        full = self._full()
        while self._young and (self._young[0].first or 0.0) < self._now - WINDOW_SECONDS:
            self._young.popleft()
        traffic = Traffic(
            **self._totals,
            unqueued_seconds=self._unqueued,
            young_tokens=sum(job.tokens for job in self._young),
            young_ended=sum(job.last is not None for job in self._young),
            queued_prompts=0 if full else len(self._queue),
            queued_streams=len(self._queue) if full else 0,
            queued_tokens=sum(job.prompt + job.tokens for job in self._queue),
        )
        router = MemberStatus(member=Member(name="router-0", role=ROLE_ROUTER), load=Load(traffic=traffic))
        signals = self._meter.observe([*workers, router], self._now)
        decision = self._policy.decide(signals, self._desired, workers, self._now)
        if decision is not None and self._config.enabled:
            self._decisions.append((self._now, decision))
            self._follow(decision)
        self._splits.append((self._now, Split(signals.prefill, signals.decode)))
        self._at(self._now + BEAT_SECONDS, self._beat)

    def _full(self) -> bool:
        """Whether the first request waits for decode."""
        if not self._queue:
            return False
        tokens = self._queue[0].prompt + self._queue[0].tokens
        decodes = [worker for worker in self._workers.values() if worker.role == "decode" and worker.ready]
        demand = Demand(tokens, self._queue[0].completion - self._queue[0].tokens)
        return not any(self._capacity(worker).fits(demand) for worker in decodes)

    def _report(self, worker: Worker) -> MemberStatus:
        most, roles = self._table.max_streams, [ROLE_PREFILL, ROLE_DECODE]
        running = min(len(worker.jobs), most)
        load = Load(
            requests=Requests(waiting=len(worker.jobs) - running, running=running, free_slots=most - running),
            promised=Promised(requests=len(worker.promised)),
            pending_tokens=worker.pending,
            computed_tokens=worker.computed,
            steps=worker.steps,
            step_seconds=worker.step_seconds,
        )
        if worker.role == "decode":
            load.blocks.total, load.blocks.held = self._capacity(worker).total, worker.held()
        state = MEMBER_STATE_READY if worker.ready else MEMBER_STATE_STARTING
        member = Member(name=worker.id.name, role=ROLES[worker.role], state=state, roles=roles)
        return MemberStatus(member=member, load=load)

    def _follow(self, decision: Decision) -> None:
        """Changes roles. The number of workers stays: `min_workers` and `max_workers` are 0 here."""
        moved = sum(1 if move.role == "prefill" else -1 for move in decision.moves)
        self._desired = Split(self._desired.prefill + moved, self._desired.decode - moved)
        for move in decision.moves:
            worker = next(worker for worker in self._workers.values() if worker.id.name == move.worker)
            self._leave(worker)
            self._at(self._now + self._table.switch, lambda worker=worker, role=move.role: self._join(worker, role))  # type: ignore[misc]  # bound at once

    def _leave(self, worker: Worker) -> None:
        """Removes a worker; its jobs begin again elsewhere, ahead of all others."""
        worker.ready = False
        jobs = [*worker.jobs, *worker.promised]
        worker.jobs.clear()
        worker.promised.clear()
        for other in self._workers.values():
            for job in jobs:
                if job in other.jobs:
                    other.jobs.remove(job)
                other.promised.pop(job, None)
        for job in sorted(jobs, key=lambda job: job.arrival, reverse=True):
            job.attempt += 1
            job.waits_since = self._now
            self._queue.appendleft(job)
        self._place()

    def _join(self, worker: Worker, role: PoolRole) -> None:
        del self._workers[worker.id]
        worker.id = WorkerId(worker.id.name, str(int(worker.id.incarnation) + 1))
        worker.role, worker.ready = role, True
        worker.steps, worker.step_seconds, worker.computed = 0, 0.0, 0
        self._workers[worker.id] = worker
        self._place()
