"""A simulated cluster for the policy that changes workers' roles.

The policy, what it measures and forecasts, the router, and the schedulers of the workers are the product's own
(`simulated/`). A step takes what the cost table says; a prompt's KV arrives on decode some time after its last step; a
worker that changes its role serves nobody for a while, and what it had begun goes on elsewhere with the tokens that it
has.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from simulated.cluster import END, Cluster, Place
from simulated.fleet import Targets, replay
from simulated.traces import Arrival
from simulated.worker import Machine, SimulatedWorker

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

    def seconds(self, chunks: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        """Seconds of a step, as `StepSeconds` has it."""
        seconds = 0.0
        if chunks:
            lengths = [tokens for _, tokens in chunks]
            squares = sum(length * length for length in lengths)
            seconds += self.prefill_fixed + self.prefill_token * sum(lengths) + self.prefill_square * squares
        if contexts:
            seconds += self.decode_fixed + self.decode_context * sum(contexts) + self.decode_stream * len(contexts)
        return seconds

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
        return Machine(self.seconds, spec, engine, self.kv_tokens, handoff_seconds=self.handoff)


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


Seen = tuple[float, bool]
"""When a request arrived, in seconds from the beginning, and whether it met both targets."""


def goodput(requests: Sequence[Seen], seconds: float) -> float:
    """Requests a second that met both targets."""
    return sum(good for _, good in requests) / seconds


def attained(requests: Sequence[Seen], begin: float, end: float) -> float:
    """Share of the requests that arrived in a time and met both targets; 1 if none arrived."""
    found = [good for arrival, good in requests if begin <= arrival < end]
    return sum(found) / len(found) if found else 1.0


def traffic(phases: Sequence[Phase], seed: int = 0) -> list[Arrival]:
    """The requests of phases that follow one another."""
    rng, found, begin = random.Random(seed), list[Arrival](), 0.0
    for phase in phases:
        at = begin
        while (at := at + rng.expovariate(phase.rate)) < begin + phase.seconds:
            lengths = (max(2, round(mean * rng.uniform(0.75, 1.25))) for mean in (phase.prompt, phase.completion))
            found.append(Arrival(at, len(found), *lengths))
        begin += phase.seconds
    return found


class Simulation:
    """One run, which is over when the simulation is made; afterwards it has what became of the split."""

    def __init__(
        self, phases: Sequence[Phase], seed: int, table: CostTable, split: tuple[int, int], config: ScalingConfig
    ) -> None:
        """
        Args:
            split: workers of each role at the start.
            config: targets, and whether the policy changes anything.
        """
        self.splits: list[tuple[float, Split]] = []
        """Workers of each role that took requests, at many moments."""
        self.decisions: list[tuple[float, Decision]] = []
        self._table = table
        self._config = config
        self._desired = Split(*split)
        self._switching: set[asyncio.Task[None]] = set()
        places = [Place("prefill", table.machine)] * split[0] + [Place("decode", table.machine)] * split[1]
        targets = {name: getattr(config, name) for name in ("ttft_target_seconds", "tpot_target_seconds")}
        options = {"classes": {INTERACTIVE: ServiceClass(**targets)}}
        seconds = sum(phase.seconds for phase in phases)
        done = replay(places, traffic(phases, seed), seconds, options, background=self._scale, max_tokens=0)
        self.outcomes = done.outcomes
        """Outcomes of all requests, in order of arrival."""
        met = Targets(config.ttft_target_seconds, 0.0, config.tpot_target_seconds).met
        self.requests: list[Seen] = [(each.arrival - done.began, met(each)) for each in done.outcomes]

    async def _scale(self, cluster: Cluster) -> None:
        """Gives the policy the reports that a supervisor gets, and carries out its decisions."""
        policy, meter, began = Policy(self._config), Meter(), cluster.now
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now = cluster.now - began
            workers = [report(cluster, worker) for worker in cluster.workers]
            member, load = cluster.router._describe()
            signals = meter.observe([*workers, MemberStatus(member=member, load=load)], now)
            decision = policy.decide(signals, self._desired, workers, now)
            if decision is not None and self._config.enabled:
                self.decisions.append((now, decision))
                self._follow(cluster, decision)
            self.splits.append((now, Split(signals.prefill, signals.decode)))

    def _follow(self, cluster: Cluster, decision: Decision) -> None:
        """Changes roles. The number of workers stays: `min_workers` and `max_workers` are 0 here."""
        moved = sum(1 if role == "prefill" else -1 for role in decision.moves.values())
        self._desired = Split(self._desired.prefill + moved, self._desired.decode - moved)
        for name, role in decision.moves.items():
            worker = next(worker for worker in cluster.workers if worker.id.name == name)
            task = asyncio.create_task(cluster.change_role(worker, role, self._table.switch))
            self._switching.add(task)
            task.add_done_callback(self._switching.discard)


def report(cluster: Cluster, worker: SimulatedWorker) -> MemberStatus:
    """The status that a worker tells the supervisor."""
    member = cluster.member(worker)
    member.roles.extend((ROLE_PREFILL, ROLE_DECODE))
    if worker.draining:
        member.state = MEMBER_STATE_STARTING
    return MemberStatus(member=member, load=worker.load())
