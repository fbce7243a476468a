"""A cluster in simulated time: a router, and simulated workers. Only ports, processes and models are left out.

cluster = Cluster(prefill=[...], decode=[...]); await cluster.start()
outcome = await cluster.ask(Question(...))        as a client does over gRPC, from the admission of the call on
"""

import asyncio
import os
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvrelay.engine.sequence import Sequence as EngineSequence
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DRAINING, MEMBER_STATE_READY, Member
from kvrelay.router.config import RouterConfig
from kvrelay.router.entry.callers import Identity
from kvrelay.router.entry.front import Caller
from kvrelay.router.errors import RequestError
from kvrelay.router.server import RouterServer
from kvrelay.router.trace import RequestTrace
from kvrelay.rpc.identity import ROLES, WorkerId, WorkerRole
from kvrelay.rpc.security import TOKEN_VARIABLE
from kvrelay.v1.inference_pb2 import GenerateRequest, GenerateResponse, SamplingParams, TokenIds
from simulated.worker import Machine, SimulatedStream, SimulatedWorker

FIRST_TOKEN, TOKENS = 32, 200
"""Smallest token of an answer or a prompt, and how many different ones there are; all have a text in the model."""
END = 1
"""The token that ends an answer."""


@dataclass(frozen=True, slots=True)
class Place:
    """A worker of the cluster, as it is set up."""

    role: WorkerRole
    machine: Machine
    slowdown: float = 1.0
    """Factor on the time of its steps."""
    slow_links: Mapping[str, float] = field(default_factory=dict)
    """Factors on the time of a byte to workers of these names: ROLE-NUMBER, by the places' order."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request of a client."""

    name: str
    prompt: Sequence[int]
    answer_tokens: int
    """Tokens that the model generates, the last of which ends the answer, unless `max_tokens` does before."""
    max_tokens: int
    service_class: str = ""
    session: str = ""
    caller: str = "client"


@dataclass(slots=True)
class Outcome:
    """A client's answer."""

    question: Question
    arrival: float
    """Time at which the request was sent; all times are simulated seconds."""
    first: float | None = None
    last: float | None = None
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    cached_tokens: int = 0
    """Tokens of the prompt that its prefill worker had."""
    error: str = ""
    """Name of the error; empty if there was none."""
    retry_seconds: float | None = None
    """Delay after which to try again, as the refusal says."""
    trace: RequestTrace | None = None
    """The router's record of it, from its end on."""

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean time between two tokens; None if there was no second one."""
        if self.first is None or self.last is None or len(self.tokens) < 2:
            return None
        return (self.last - self.first) / (len(self.tokens) - 1)

    @property
    def complete(self) -> bool:
        return not self.error and self.first is not None


class _Sink:
    """Takes a call's messages at once."""

    def __init__(self, cluster: "Cluster", outcome: Outcome) -> None:
        self._cluster, self._outcome = cluster, outcome

    @property
    def ready(self) -> bool:
        return self._outcome.first is not None

    def write_now(self, message: GenerateResponse) -> None:
        outcome, now = self._outcome, self._cluster.now
        if message.token_ids:
            if outcome.first is None:
                outcome.first = now
            outcome.last = now
            outcome.tokens.extend(message.token_ids)
        if message.finish_reason:
            outcome.cached_tokens = message.usage.cached_tokens

    async def write(self, message: GenerateResponse) -> None:
        self.write_now(message)


class Cluster:
    """Made and used on a simulated event loop."""

    def __init__(self, places: Iterable[Place], options: Mapping[str, object] | None = None) -> None:
        """
        Args:
            places: the workers.
            options: of the router.
        """
        os.environ.setdefault(TOKEN_VARIABLE, "no-port-is-open-here")  # the router wants one
        self._loop = asyncio.get_running_loop()
        self._workers: dict[WorkerId, SimulatedWorker] = {}
        for number, place in enumerate(places):
            identity = WorkerId(f"{place.role}-{number}", "0")
            self._workers[identity] = SimulatedWorker(self, identity, place)
        given = {"model": "pico", "http_port": None, "max_requests": 1_000_000, "max_queue": 1_000_000}
        config = RouterConfig(**{**given, **(options or {})})  # type: ignore[arg-type]  # options by name
        self.router = RouterServer(config, self._loop.time, partial(SimulatedStream, self))
        self._answers: dict[str, tuple[int, int]] = {}
        """Seed and number of tokens of each answer, by the question's name."""

    async def start(self) -> None:
        """Returns when the router knows all workers."""
        self.tell_members()
        while not self.router.registry.complete:
            await self.router.registry.changed()

    @property
    def now(self) -> float:
        """Simulated time in seconds."""
        return self._loop.time()

    @property
    def workers(self) -> list[SimulatedWorker]:
        return list(self._workers.values())

    def worker(self, identity: WorkerId) -> SimulatedWorker | None:
        """The worker of this incarnation; None if it is gone."""
        return self._workers.get(identity)

    def token(self, sequence: EngineSequence) -> int:
        """The next token of a sequence: a function of the request and the token's index. Of a request whose client has
        left, any token."""
        seed, length = self._answers.get(sequence.request.request_id.rpartition("/")[0], (0, 0))
        index = len(sequence.tokens) - sequence.request.prompt_tokens
        return END if index + 1 == length else FIRST_TOKEN + (seed + index * (1 + seed % 7)) % TOKENS

    async def ask(self, question: Question) -> Outcome:
        """Sends a request, and returns when it has ended."""
        outcome = Outcome(question, self.now)
        sampling = SamplingParams(max_tokens=question.max_tokens, temperature=0.0)
        request = GenerateRequest(
            request_id=question.name,
            token_ids=TokenIds(ids=question.prompt),
            sampling=sampling,
            slo_class=question.service_class,
            session=question.session,
        )
        self._answers[question.name] = zlib.crc32(question.name.encode()) % 1009, question.answer_tokens
        try:
            with self.router.front.generation(Caller(Identity(), question.caller), 0) as call:
                await call.generate(request, _Sink(self, outcome))
                outcome.trace = call.ended[-1]
        except RequestError as error:
            outcome.error = type(error).__name__
            outcome.retry_seconds = getattr(error, "retry_seconds", None)
        finally:
            del self._answers[question.name]
        return outcome

    # Changes of roles.

    def tell_members(self) -> None:
        """Tells the router the workers, as a supervisor does."""
        self.router.registry.update([self.member(worker) for worker in self._workers.values()])

    def member(self, worker: SimulatedWorker) -> Member:
        """A worker's entry in the membership."""
        state = MEMBER_STATE_DRAINING if worker.draining else MEMBER_STATE_READY
        return Member(
            name=worker.id.name,
            incarnation=worker.id.incarnation,
            role=ROLES[worker.role],
            state=state,
            compatibility="simulated",
        )

    async def change_role(self, worker: SimulatedWorker, role: WorkerRole, seconds: float) -> None:
        """Gives a worker another role: its requests go on elsewhere; it is back after so many seconds."""
        worker.drain()
        self.tell_members()
        await asyncio.sleep(seconds)
        del self._workers[worker.id]
        worker.take_role(WorkerId(worker.id.name, str(int(worker.id.incarnation) + 1)), role)
        self._workers[worker.id] = worker
        self.tell_members()
