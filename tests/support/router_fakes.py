"""Scripted workers and a supervisor, real gRPC servers in the test's own event loop; and routers over them."""

import asyncio
import contextlib
import hashlib
import json
import subprocess
import sys
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from anyio.from_thread import start_blocking_portal

from kvrelay.client import AsyncClient, Completion, Prompt
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY, AttendRequest, AttendResponse, Member, MemberState
from kvrelay.internal.v1.supervisor_pb2_grpc import SupervisorServiceServicer, add_SupervisorServiceServicer_to_server
from kvrelay.internal.v1.worker_pb2 import (
    Begin,
    Cancel,
    ClientCall,
    DecodeReport,
    Failure,
    Load,
    ModelInfo,
    PrefillReport,
    RelayRequest,
    RelayResponse,
    RequestEvent,
    Submit,
    TransferReport,
    WorkerHello,
)
from kvrelay.internal.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from kvrelay.router.config import RouterConfig
from kvrelay.router.server import RouterServer
from kvrelay.router.trace import RequestTrace
from kvrelay.rpc.identity import ROLES
from kvrelay.rpc.options import server_options
from kvrelay.v1.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_UNSPECIFIED, FinishReason, TokenLogprobs
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub
from support.tokenizers import model_folder

WAIT_SECONDS = 60.0
TURN_SECONDS = 0.01


def token_at(index: int) -> int:
    """The token that scripted workers send at an index of a completion, if they send no others."""
    return 40 + index


def tokens(count: int) -> tuple[int, ...]:
    """The first `count` tokens of such a completion."""
    return tuple(map(token_at, range(count)))


def key_file(folder: Path, **keys: str) -> str:
    """Writes a file of API keys; returns its path.

    Args:
        keys: options of the key of each tenant, whose name is its key.
    """
    path = folder / "api_keys"
    path.write_text("".join(f"{name} {hashlib.sha256(name.encode()).hexdigest()} {keys[name]}\n" for name in keys))
    return str(path)


def entries(state: object) -> int:
    """Counts the entries of all containers that are attributes of an object: what it remembers."""
    return sum(len(value) for value in vars(state).values() if isinstance(value, (dict, list, set, deque)))


async def until(condition: Callable[[], Any], what: str = "what was waited for", seconds: float = WAIT_SECONDS) -> Any:
    """Waits until `condition()` is true; returns its value."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not (value := condition()):
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        await asyncio.sleep(0.005)
    return value


async def within(seconds: float, event: asyncio.Event, what: str) -> None:
    """Waits for an event for as many turns of the event loop as an idle machine has in this time.

    Router, client and workers of these tests share the loop: other processes that keep it from its turns delay all of
    them alike, and are not what a promise of the router is about.
    """
    for _ in range(round(seconds / TURN_SECONDS)):
        if event.is_set():
            return
        await asyncio.sleep(TURN_SECONDS)
    assert event.is_set(), f"not within {seconds} s: {what}"


@dataclass
class Job:
    """One submitted part of a request; a script answers it."""

    worker: "FakeWorker"
    submit: Submit
    stream: "asyncio.Queue[RelayResponse | None]"
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set when the worker may compute it: a suspect waits for its router's word."""

    @property
    def base(self) -> int:
        """Index of the first token of this attempt."""
        return len(self.submit.token_ids) - self.submit.prompt_tokens

    async def shown(self, tokens: int) -> None:
        """Waits until the router has sent the client so many tokens of the completion."""
        router = self.worker.router
        assert router is not None

        def reached() -> bool:
            lives = router.requests.lives(self.submit.tenant, self.submit.request_id, 0.0)
            return any(life.completion_tokens >= tokens for life in lives)

        await until(reached, f"the client has {tokens} tokens")

    def send(
        self,
        index: int = 0,
        tokens: tuple[int, ...] = (),
        finish_reason: FinishReason = FINISH_REASON_UNSPECIFIED,
        **more: Any,
    ) -> None:
        if len(tokens) == 1 and not finish_reason and not more:
            # As a worker sends a token that comes with nothing else.
            self.stream.put_nowait(RelayResponse(slots=[self.submit.slot], indices=[index], token_ids=tokens))
            return
        event = RequestEvent(
            request_id=self.submit.request_id,
            attempt=self.submit.attempt,
            first_index=index,
            token_ids=tokens,
            finish_reason=finish_reason,
            **more,
        )
        self.stream.put_nowait(RelayResponse(events=[event]))

    def take(self) -> None:
        """Tells the router that the worker has taken a suspect."""
        self.send(taken=True)

    def fail(self, code: Failure.Code, message: str = "scripted", **more: Any) -> None:
        """Returns the request; `more` are further fields of the failure."""
        self.send(failure=Failure(code=code, message=message, **more))


def length_if(last: bool) -> FinishReason:
    """The finish reason of a token that reaches max_tokens if it is the `last`."""
    return FINISH_REASON_LENGTH if last else FINISH_REASON_UNSPECIFIED


Script = Callable[[Job], Awaitable[None]]
Suspected = Callable[[Job], object]
"""Function that takes or refuses a suspect."""


def prefill_of(tokens: Callable[[int], int] = token_at) -> Script:
    """The prefill role: the token at `base`, then the report of the hand-off."""

    async def script(job: Job) -> None:
        last = job.base + 1 == job.submit.sampling.max_tokens
        job.send(
            job.base,
            (tokens(job.base),),
            length_if(last),
            prefill=PrefillReport(queue_seconds=0.001, prefill_seconds=0.002, cached_tokens=1),
        )
        if job.submit.HasField("peer"):
            job.send(transfer=TransferReport(transfer_seconds=0.003, handoff_seconds=0.001, transfer_bytes=640))

    return script


def decode_of(tokens: Callable[[int], int] = token_at, pause: float = 0.0) -> Script:
    """The decode role: the tokens from `base + 1` to max_tokens, one message each."""

    async def script(job: Job) -> None:
        end = job.submit.sampling.max_tokens
        for index in range(job.base + 1, end):
            report = {"decode": DecodeReport(queue_seconds=0.004)} if index == job.base + 1 else {}
            job.send(index, (tokens(index),), length_if(index == end - 1), **report)
            await asyncio.sleep(pause)

    return script


def colocated_of(tokens: Callable[[int], int] = token_at) -> Script:
    """The co-located role: all tokens, one message each."""

    async def script(job: Job) -> None:
        sampling = job.submit.sampling
        more = {"logprobs": [TokenLogprobs(logprob=-1.0, rank=1)]} if sampling.HasField("logprobs") else {}
        for index in range(job.base, sampling.max_tokens):
            job.send(index, (tokens(index),), length_if(index == sampling.max_tokens - 1), **more)

    return script


async def silent(job: Job) -> None:
    """Takes a request and sends nothing."""


def usual(role: str) -> Script:
    """Default script of a worker of this role."""
    return {"prefill": prefill_of, "decode": decode_of, "colocated": colocated_of}[role]()


def failing(code: Failure.Code, message: str = "scripted", **more: Any) -> Script:
    """Returns each request with a failure."""

    async def script(job: Job) -> None:
        job.fail(code, message, **more)

    return script


def first_attempt(script: Script) -> Script:
    """A script for the first attempt of a request; later ones get what is usual."""

    async def chosen(job: Job) -> None:
        await (script if job.submit.attempt == 1 else usual(job.worker.role))(job)

    return chosen


def after(gate: asyncio.Event, script: Script) -> Script:
    """A script that begins when the gate is open."""

    async def gated(job: Job) -> None:
        await gate.wait()
        await script(job)

    return gated


class FakeWorker(WorkerServiceServicer):
    """Serves the relay; a script, run as one task per submitted part that has begun, sends the answers."""

    def __init__(
        self,
        name: str,
        role: str,
        script: Script,
        *,
        compatibility: str = "",
        tensor_ranks: int = 1,
        suspected: Suspected = Job.take,
        **model: Any,
    ) -> None:
        self.name = name
        self.compatibility = compatibility
        self.tensor_ranks = tensor_ranks
        self.role = role
        self.script = script
        self.suspected = suspected
        self.incarnation = uuid.uuid4().hex
        self.model = ModelInfo(
            **{
                "name": "fake",
                "architecture": "FakeForCausalLM",
                "vocab_size": 400,
                "max_context": 64,
                "eos_token_ids": [1],
                "dtype": "float32",
                "fingerprint": "f" * 64,
                **model,
            }
        )
        self.router: RouterServer | None = None
        """Router of the cluster; None until it has started."""
        self.jobs: list[Job] = []
        self.fences: list[ClientCall] = []
        self.streams = 0
        self._outboxes: list[asyncio.Queue[RelayResponse | None]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self.server = grpc.aio.server(options=server_options())
        add_WorkerServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()

    async def stop(self) -> None:
        """Breaks every stream, as the death of the process would."""
        for task in self._tasks:
            task.cancel()
        await self.server.stop(None)

    def cut(self) -> None:
        """Ends every stream, as a worker does that got no CPU for too long, and lives."""
        for outbox in self._outboxes:
            outbox.put_nowait(None)

    def report_load(self, load: Load) -> None:
        """Reports a load that accounts for every part submitted so far."""
        for outbox in self._outboxes:
            outbox.put_nowait(RelayResponse(load=load, submits_seen=len(self.jobs)))

    def member(self, state: MemberState = MEMBER_STATE_READY) -> Member:
        return Member(
            name=self.name,
            role=ROLES[self.role],
            incarnation=self.incarnation,
            address=f"127.0.0.1:{self.port}",
            state=state,
            compatibility=self.compatibility,
            tensor_ranks=self.tensor_ranks,
        )

    async def Relay(self, request_iterator: AsyncIterator[RelayRequest], context: Any) -> None:
        first = await anext(request_iterator)
        if first.hello.worker_incarnation != self.incarnation:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another incarnation")
        self.streams += 1
        stream: asyncio.Queue[RelayResponse | None] = asyncio.Queue()
        self._outboxes.append(stream)
        stream.put_nowait(
            RelayResponse(hello=WorkerHello(name=self.name, incarnation=self.incarnation, model=self.model))
        )
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while (message := await stream.get()) is not None:
                await context.write(message)
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[RelayRequest], stream: "asyncio.Queue[RelayResponse | None]") -> None:
        async for request in requests:
            if request.HasField("submit"):
                job = Job(self, request.submit, stream)
                self.jobs.append(job)
                self._tasks.append(asyncio.create_task(self._compute(job, self.script)))
            elif request.HasField("begin"):
                self._job(request.begin).begun.set()
            elif request.HasField("fence"):
                self._fence(request.fence)
            elif request.HasField("cancel"):
                self._job(request.cancel).cancelled.set()
        stream.put_nowait(None)

    def _job(self, named: Begin | Cancel) -> Job:
        key = named.request_id, named.attempt
        return next(job for job in self.jobs if (job.submit.request_id, job.submit.attempt) == key)

    async def _compute(self, job: Job, script: Script) -> None:
        if job.submit.suspect_tokens:
            self.suspected(job)
        else:
            job.begun.set()
        await job.begun.wait()
        await script(job)

    def _fence(self, fence: ClientCall) -> None:
        """Returns what earlier calls of the request have submitted, as a worker does."""
        self.fences.append(fence)
        for job in self.jobs:
            call = job.submit.client_call
            if call.key == fence.key and call.call < fence.call:
                job.fail(Failure.CODE_FENCED)


def fake(name: str, script: Script | None = None, **options: Any) -> FakeWorker:
    """A worker whose role is the first part of its name, and which does what such a worker does if it has no script."""
    role = name.partition("-")[0]
    return FakeWorker(name, role, usual(role) if script is None else script, **options)


class FakeSupervisor(SupervisorServiceServicer):
    """Sends the same membership to every member."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.heard: dict[str, Member] = {}
        self.fenced = False
        self._version = 0
        self._changed = asyncio.Event()

    async def start(self, port: int = 0) -> None:
        self.server = grpc.aio.server(options=server_options())
        add_SupervisorServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        await self.server.start()

    async def stop(self) -> None:
        await self.server.stop(None)

    def announce(self, *members: Member) -> None:
        self.members = list(members)
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def Attend(self, request_iterator: AsyncIterator[AttendRequest], context: Any) -> None:
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                changed = self._changed
                await context.write(AttendResponse(version=self._version, members=self.members, fenced=self.fenced))
                await changed.wait()
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[AttendRequest]) -> None:
        async for request in requests:
            self.heard[request.member.name] = request.member


class Http:
    """Calls a router by HTTP, as OpenAI's clients do."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self.session = session
        self.base = f"http://{address}"

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        async with self.session.get(self.base + path, **more) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        async with self.session.post(self.base + path, json=body, **more) as response:
            return response.status, await response.json()

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The chunks, after a check of the frames around them."""
        async with self.session.post(self.base + path, json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/event-stream"
            text = await response.text()
        events = text.split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith("data: ") for event in events)
        assert events.pop() == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]


@dataclass
class FakeCluster:
    """A real router over fake workers, and callers of it, which are made when they are first used."""

    router: RouterServer
    supervisor: FakeSupervisor
    workers: dict[str, FakeWorker]
    records: list[RequestTrace]
    """Requests that have ended."""
    callers: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    """Callers and later workers, which end with the cluster."""

    def client_of(self, **options: Any) -> AsyncClient:
        """Another client of the router."""
        client = AsyncClient(self.router.address, **{"timeout": 30, **options})
        self.callers.push_async_callback(client.close)
        return client

    @cached_property
    def client(self) -> AsyncClient:
        """A client whose calls have 30 s if they say nothing else."""
        return self.client_of()

    async def ask(
        self, prompt: Prompt = "hello", count: int = 10, client: AsyncClient | None = None, **options: Any
    ) -> Completion:
        """Asks for `count` tokens, and checks that they are those of `token_at`."""
        completion = await (client or self.client).complete(prompt, **{"max_tokens": count, **options})
        assert completion.token_ids == tokens(count)
        return completion

    def asking(self, *arguments: Any, **options: Any) -> "asyncio.Task[Completion]":
        """A task that asks."""
        return asyncio.create_task(self.ask(*arguments, **options), name="client")

    @cached_property
    def channel(self) -> grpc.aio.Channel:
        """A channel to the router's public gRPC."""
        channel = grpc.aio.insecure_channel(self.router.address)
        self.callers.push_async_callback(channel.close)
        return channel

    @cached_property
    def stub(self) -> InferenceServiceStub:
        """The methods of the public gRPC."""
        return InferenceServiceStub(self.channel)

    @cached_property
    def http(self) -> Http:
        """A client of HTTP with as many connections as it likes."""
        assert self.router.http_address
        base, limit = f"http://{self.router.http_address}", aiohttp.TCPConnector(limit=0)
        session = aiohttp.ClientSession(base, connector=limit, timeout=aiohttp.ClientTimeout(30))
        self.callers.push_async_callback(session.close)
        return Http(session, self.router.http_address)

    @property
    def calls(self) -> int:
        """Completions and other calls that the router has admitted and that have not ended."""
        return self.router.running + self.router.waiting

    async def idle(self, seconds: float = WAIT_SECONDS) -> None:
        """Waits until no call is left in the router."""
        await until(lambda: self.calls == 0, "no call is left", seconds)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        families = self.router.metrics.registry.collect()
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    @property
    def outcomes(self) -> list[str]:
        """The outcomes of the requests that have ended, in order."""
        return [str(record.outcome) for record in self.records]

    def announce(self, **states: MemberState) -> None:
        """Announces every worker as ready, or in the state given by name (`_` for `-`)."""
        named = {name.replace("_", "-"): state for name, state in states.items()}
        self.supervisor.announce(*(w.member(named.get(w.name, MEMBER_STATE_READY)) for w in self.workers.values()))

    async def ready(self, *names: str) -> None:
        """Waits until the router would place requests on exactly these workers."""

        def ready() -> bool:
            return {view.id.name for view in self.router.registry.view() if view.ready} == set(names)

        await until(ready, f"ready workers {names}")

    async def join(self, *workers: FakeWorker, alone: bool = False) -> None:
        """Starts more workers, and announces them beside the others, or alone: then the others are gone."""
        for worker in workers:
            worker.router = self.router
            await worker.start()
            self.callers.push_async_callback(worker.stop)
        self.workers = {**({} if alone else self.workers), **{worker.name: worker for worker in workers}}
        self.announce()

    async def report(self, worker: str, load: Load) -> None:
        """A worker reports its load, and the router has received it."""
        self.workers[worker].report_load(load)
        view = self.router.registry.view
        await until(lambda: (worker, load) in [(each.id.name, each.report) for each in view()], "the load")

    async def job(self, worker: str, at: int = 0) -> Job:
        """The worker's `at`-th part, as soon as it is submitted."""
        jobs = self.workers[worker].jobs
        await until(lambda: len(jobs) > at, f"{worker} got part {at}")
        return jobs[at]


def _noting(router: RouterServer, records: list[RequestTrace]) -> RouterServer:
    """The same router; its requests are among the records when they have ended."""
    metrics = router.front.dispatch.metrics
    ended = metrics.ended

    def noted(trace: RequestTrace) -> None:
        ended(trace)
        records.append(trace)

    metrics.ended = noted  # type: ignore[method-assign]
    return router


@contextlib.asynccontextmanager
async def fake_cluster(folder: Path, *workers: FakeWorker, **config: Any) -> AsyncIterator[FakeCluster]:
    """A router that has reached all of the workers."""
    supervisor = FakeSupervisor()
    await supervisor.start()
    options = {"model": str(model_folder(folder)), "grpc_port": 0, "http_port": None}
    options["supervisor"] = f"127.0.0.1:{supervisor.port}"
    records: list[RequestTrace] = []
    router = _noting(RouterServer(RouterConfig(**{**options, **config})), records)
    for worker in workers:
        worker.router = router
        await worker.start()
    await router.start()
    cluster = FakeCluster(router, supervisor, {worker.name: worker for worker in workers}, records)
    try:
        cluster.announce()
        await cluster.ready(*cluster.workers)
        yield cluster
    finally:
        await cluster.callers.aclose()
        await router.stop(0.0)
        for worker in workers:
            await worker.stop()
        await supervisor.stop()


@contextlib.asynccontextmanager
async def second_router(cluster: FakeCluster, **config: Any) -> AsyncIterator[RouterServer]:
    """Another router of the cluster, which has reached all of its workers."""
    options = {"name": "router-1", "grpc_port": 0, "http_port": None, **config}
    router = _noting(RouterServer(replace(cluster.router.config, **options)), cluster.records)
    await router.start()
    try:
        names = set(cluster.workers)
        await until(lambda: {view.id.name for view in router.registry.view() if view.ready} == names, "it is ready")
        yield router
    finally:
        await router.stop(0.0)


def pair(tokens: Callable[[int], int] = token_at, pause: float = 0.0) -> tuple[FakeWorker, FakeWorker]:
    """A prefill and a decode worker that send the token `tokens(index)` at each index."""
    return (
        FakeWorker("prefill-0", "prefill", prefill_of(tokens)),
        FakeWorker("decode-0", "decode", decode_of(tokens, pause)),
    )


def run(test: Callable[[], Awaitable[None]], seconds: float = 60.0) -> None:
    """Runs an asynchronous test and checks that it leaves no task behind."""

    def left() -> list[str]:
        """The tasks with a name; the libraries' own, which have none, may go on for a while."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        return [task.get_name() for task in tasks if not task.get_name().startswith("Task-")]

    async def main() -> None:
        await asyncio.wait_for(test(), seconds)
        with contextlib.suppress(AssertionError):
            await until(lambda: not left(), "no task is left")
        assert left() == [], "tasks left behind"

    asyncio.run(main())


@contextlib.contextmanager
def background(folder: Path, tokens: Callable[[int], int], **config: Any) -> Iterator[FakeCluster]:
    """A fake cluster whose event loop runs in a thread, for tests whose own code blocks.

    Args:
        tokens: the token that the workers send at each index.
        config: options of the router.
    """
    cluster = fake_cluster(folder, *pair(tokens), **config)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(cluster) as made:
        yield made


@asynccontextmanager
async def router_process(
    folder: Path, worker: FakeWorker, *, command: Sequence[str] = (), **options: object
) -> AsyncIterator[tuple[str, int]]:
    """Address and pid of a router in a process of its own, which has reached the worker.

    Args:
        command: a program that becomes the router, as its arguments say.
    """
    supervisor = FakeSupervisor()
    await supervisor.start()
    await worker.start()
    config = folder / "router.json"
    settings = {"model": str(model_folder(folder / "model")), "grpc_port": 0, "http_port": None, **options}
    config.write_text(json.dumps(settings | {"supervisor": f"127.0.0.1:{supervisor.port}"}))
    command = [*command, sys.executable, "-m", "kvrelay.router", "--config", str(config)]
    with (folder / "router.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        address = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))["address"]
        supervisor.announce(worker.member())
        await until(lambda: worker.streams, "the router has reached the worker", 30)
        yield address, process.pid
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await worker.stop()
        await supervisor.stop()
