"""A simulated cluster for the policy that changes workers' roles.

The policy, what it measures and forecasts, the router, and the schedulers of the workers are the product's own
(`simulated/`). A step takes what the cost table says; a prompt's KV arrives on decode some time after its last step; a
worker that changes its role serves nobody for a while, and what it had begun goes on elsewhere with the tokens that it
has.
"""

import asyncio
import math
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from simulated.clock import run
from simulated.cluster import END, FIRST_TOKEN, TOKENS, Cluster, Place, Question
from simulated.worker import Machine, SimulatedWorker, StepSeconds

from kvrelay.cluster.scaling.config import ScalingConfig
from kvrelay.cluster.scaling.forecast import Split
from kvrelay.cluster.scaling.policy import Decision, Policy
from kvrelay.cluster.scaling.signals import Meter
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_STARTING, ROLE_DECODE, ROLE_PREFILL, MemberStatus
from kvrelay.router.config import INTERACTIVE, ServiceClass

BEAT_SECONDS = 0.5
BLOCK = 16
"""Tokens in a block of KV."""
VOCABULARY, MAX_CONTEXT = 256, 4096


@dataclass(frozen=True, slots=True)
class CostTable(StepSeconds):
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

    def seconds(self, chunks: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        """Seconds of a step, as `StepSeconds.seconds`."""
        seconds = self.prefill([tokens for _, tokens in chunks]) if chunks else 0.0
        return seconds + (self.decode(len(contexts), sum(contexts)) if contexts else 0.0)

    @property
    def machine(self) -> Machine:
        """A simulated worker with these costs and sizes."""
        spec = ModelSpec("OPTForCausalLM", VOCABULARY, MAX_CONTEXT, (END,), "float16", "0" * 64)
        engine = EngineConfig(
            block_size=BLOCK,
            kv_memory_bytes=1,
            max_batch_tokens=self.max_chunk,
            max_sequences=self.max_streams,
            prefix_cache=False,
        )
        return Machine(self, spec, engine, self.kv_tokens, handoff_seconds=self.handoff)


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
    """One request; times are seconds from the beginning of the run."""

    arrival: float
    prompt: int
    """Tokens of the prompt; `completion` is in tokens, too."""
    completion: int
    first: float | None = None
    last: float | None = None
    """Time of the last token; None if not all of them have come."""

    @property
    def ttft(self) -> float:
        return math.inf if self.first is None else self.first - self.arrival

    @property
    def tpot(self) -> float:
        if self.first is None or self.last is None:
            return math.inf
        return (self.last - self.first) / max(1, self.completion - 1)

    def good(self, config: ScalingConfig) -> bool:
        """Whether the request has ended within both targets."""
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


class Simulation:
    """One run: `Simulation(...).run()`; afterwards it has the jobs, and what became of the split."""

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
        self.jobs = list(jobs)
        self.splits: list[tuple[float, Split]] = []
        """Workers of each role that took requests, at many moments."""
        self.decisions: list[tuple[float, Decision]] = []
        self._table = table
        self._config = config
        self._end = end
        self._policy, self._meter = Policy(config), Meter()
        self._desired = Split(*split)
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self) -> "Simulation":
        """Runs to the end and returns itself; what has not ended by then never does."""
        run(self._run())
        return self

    async def _run(self) -> None:
        machine = self._table.machine
        roles = [Place("prefill", machine)] * self._desired.prefill + [Place("decode", machine)] * self._desired.decode
        targets = {name: getattr(self._config, name) for name in ("ttft_target_seconds", "tpot_target_seconds")}
        self._cluster = cluster = Cluster(roles, {"classes": {INTERACTIVE: ServiceClass(**targets)}})
        await cluster.start()
        self._began = cluster.now
        self._do(self._beat())
        for number, job in enumerate(self.jobs):
            await asyncio.sleep(self._began + job.arrival - cluster.now)
            self._do(self._ask(number, job))
        await asyncio.sleep(self._began + self._end - cluster.now)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _do(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler({"message": "the simulation failed", "exception": error})

    async def _ask(self, number: int, job: Job) -> None:
        tokens = random.Random(number).choices(range(FIRST_TOKEN, FIRST_TOKEN + TOKENS), k=job.prompt)
        outcome = await self._cluster.ask(Question(f"job-{number}", tokens, job.completion + 1, job.completion))
        job.first = None if outcome.first is None else outcome.first - self._began
        if outcome.complete and outcome.last is not None:
            job.last = outcome.last - self._began

    # Scaling.

    async def _beat(self) -> None:
        """Gives the policy the reports that a supervisor gets, and carries out its decision."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now = self._cluster.now - self._began
            workers = [self._report(worker) for worker in self._cluster.workers]
            member, load = self._cluster.router._describe()
            signals = self._meter.observe([*workers, MemberStatus(member=member, load=load)], now)
            decision = self._policy.decide(signals, self._desired, workers, now)
            if decision is not None and self._config.enabled:
                self.decisions.append((now, decision))
                self._follow(decision)
            self.splits.append((now, Split(signals.prefill, signals.decode)))

    def _report(self, worker: SimulatedWorker) -> MemberStatus:
        member = self._cluster.member(worker)
        member.roles.extend((ROLE_PREFILL, ROLE_DECODE))
        if worker.draining:
            member.state = MEMBER_STATE_STARTING
        return MemberStatus(member=member, load=worker.load())

    def _follow(self, decision: Decision) -> None:
        """Changes roles. The number of workers stays: `min_workers` and `max_workers` are 0 here."""
        moved = sum(1 if role == "prefill" else -1 for role in decision.moves.values())
        self._desired = Split(self._desired.prefill + moved, self._desired.decode - moved)
        for name, role in decision.moves.items():
            worker = next(worker for worker in self._cluster.workers if worker.id.name == name)
            self._do(self._cluster.change_role(worker, role, self._table.switch))
