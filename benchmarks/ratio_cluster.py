"""The real processes of `ratio.py`: supervisor, router, eight workers; and the clients."""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from ratio_costs import BLOCK
from ratio_simulator import Job
from ratio_worker import TABLE

from kvrelay.cluster.scaling.config import ScalingConfig
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_READY,
    ROLE_DECODE,
    ROLE_PREFILL,
    ROLE_ROUTER,
    GetStatusRequest,
    GetStatusResponse,
    SetRoleRequest,
)
from kvrelay.internal.v1.supervisor_pb2_grpc import SupervisorServiceStub
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.options import channel_options
from kvrelay.rpc.security import TOKEN_VARIABLE
from kvrelay.v1.inference_pb2 import GenerateRequest, SamplingParams, TokenIds
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub

START_SECONDS, SETTLE_SECONDS, STOP_SECONDS = 240.0, 60.0, 60.0
REQUEST_SECONDS = 120.0
VOCAB = 250
WORKER = Path(__file__).parent / "ratio_worker.py"
MODULE = "ratio_worker"


@dataclass(slots=True)
class Answer:
    """Tokens and error that a client has seen of one request."""

    job: Job
    tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """The cluster at one moment of a run."""

    time: float
    prefill: int
    """Workers that are ready."""
    decode: int
    prefill_pressure: float | None
    decode_pressure: float | None


class Cluster:
    """A running cluster; use `cluster`."""

    def __init__(self, supervisor: str, credentials: Credentials) -> None:
        self._supervisor = supervisor
        self._credentials = credentials
        self._channel = credentials.blocking_channel(supervisor, "supervisor")
        self._stub = SupervisorServiceStub(self._channel)

    def status(self) -> GetStatusResponse:
        return self._stub.GetStatus(
            GetStatusRequest(), timeout=20, wait_for_ready=True, metadata=self._credentials.metadata
        )

    def counts(self, status: GetStatusResponse) -> tuple[int, int]:
        """Prefill and decode workers that are ready."""
        ready = [entry.member.role for entry in status.members if entry.member.state == MEMBER_STATE_READY]
        return ready.count(ROLE_PREFILL), ready.count(ROLE_DECODE)

    def set_split(self, prefill: int) -> None:
        """Gives workers other roles until so many are prefill workers; returns when all are ready."""
        status = self.status()
        roles = {member.name: member.role for member in status.desired.members if member.role != ROLE_ROUTER}
        for name, role in sorted(roles.items()):
            surplus = sum(each == ROLE_PREFILL for each in roles.values()) - prefill
            if surplus and role == (ROLE_PREFILL if surplus > 0 else ROLE_DECODE):
                roles[name] = other = ROLE_DECODE if surplus > 0 else ROLE_PREFILL
                answer = self._stub.SetRole(
                    SetRoleRequest(member=name, role=other), timeout=20, metadata=self._credentials.metadata
                )
                if answer.HasField("refusal"):
                    raise RuntimeError(answer.refusal.message)
                self._until(lambda: self.status().settled, "the new role", SETTLE_SECONDS)
        self._until(lambda: self.counts(self.status())[0] == prefill, "the split", SETTLE_SECONDS)

    def until_ready(self, workers: int) -> None:
        self._until(lambda: (now := self.status()).ready and sum(self.counts(now)) == workers, "ready", START_SECONDS)

    async def run(self, jobs: Sequence[Job], seconds: float) -> tuple[list[Answer], list[Observation]]:
        """Sends each request at its time, and waits for all answers.

        Args:
            seconds: of the traffic, for which the cluster is observed.
        """
        router = next(entry.member.address for entry in self.status().members if entry.member.role == ROLE_ROUTER)
        async with grpc.aio.insecure_channel(router, options=channel_options()) as channel:
            stub, began = InferenceServiceStub(channel), time.monotonic()
            watching = asyncio.create_task(self._observe(began, seconds))
            answers = [Answer(job) for job in jobs]
            async with asyncio.TaskGroup() as group:
                for number, answer in enumerate(answers):
                    await asyncio.sleep(began + answer.job.arrival - time.monotonic())
                    group.create_task(_ask(stub, number, answer, began))
            return answers, await watching

    async def _observe(self, began: float, seconds: float) -> list[Observation]:
        seen: list[Observation] = []
        while (now := time.monotonic() - began) < seconds:
            status = await asyncio.to_thread(self.status)
            scaling = status.scaling
            pressures = (
                getattr(scaling, name) if scaling.HasField(name) else None
                for name in ("prefill_pressure", "decode_pressure")
            )
            seen.append(Observation(now, *self.counts(status), *pressures))
            await asyncio.sleep(0.5)
        return seen

    @staticmethod
    def _until(condition: Any, what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {seconds:g} s: {what}")
            time.sleep(0.2)


async def _ask(stub: InferenceServiceStub, number: int, answer: Answer, began: float) -> None:
    job = answer.job
    prompt = random.Random(number).choices(range(VOCAB), k=job.prompt)
    sampling = SamplingParams(max_tokens=job.completion, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(token_ids=TokenIds(ids=prompt), sampling=sampling)
    sent = time.monotonic()
    try:
        async for message in stub.Generate(request, timeout=REQUEST_SECONDS):
            now = time.monotonic()
            if message.token_ids:
                answer.tokens += len(message.token_ids)
                job.first, job.last = now - began if job.first is None else job.first, now - began
    except grpc.aio.AioRpcError as error:
        answer.error = f"{error.code().name}: {error.details()}"
    if not answer.error and answer.tokens != job.completion:
        answer.error = f"{answer.tokens} of {job.completion} tokens"
    if answer.error:
        job.last = None
    job.arrival = sent - began  # this client may have been late itself


@contextmanager
def cluster(split: tuple[int, int], scaling: ScalingConfig) -> Iterator[Cluster]:
    """A ready cluster with this split; nothing of it is left at the end."""
    os.environ.setdefault(TOKEN_VARIABLE, "the-token-of-this-benchmark")
    engine = {
        "block_size": BLOCK,
        "max_batch_tokens": TABLE.max_chunk,
        "max_sequences": TABLE.max_streams,
        "prefix_cache": True,
        "threads": 1,
    }
    roles = ["prefill"] * split[0] + ["decode"] * split[1]
    worker = {"model": "pico", "dtype": "float32", "engine": engine}
    members: dict[str, Any] = {
        f"worker-{index}": {"module": MODULE, "options": {"role": role, **worker}} for index, role in enumerate(roles)
    }
    targets = {name: getattr(scaling, name) for name in ("ttft_target_seconds", "tpot_target_seconds")}
    router = {"model": "pico", "grpc_port": 0, "http_port": None, **targets}
    members["router-0"] = {"module": "kvrelay.router", "options": router}
    with tempfile.TemporaryDirectory(prefix="kvrelay-ratio-") as folder:
        config = Path(folder) / "supervisor.json"
        options = {"state_path": str(Path(folder) / "record"), "members": members, "scaling": asdict(scaling)}
        # A busy machine may keep a process from its heartbeat.
        options |= {"suspect_seconds": 5.0, "dead_seconds": 15.0}
        config.write_text(json.dumps(options))
        paths = [str(WORKER.parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-m", "kvrelay.cluster.supervisor", "--config", str(config)]
        with (Path(folder) / "supervisor.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            running = Cluster(str(json.loads(line)["address"]), Credentials.of("operator", _security()))
            running.until_ready(len(roles))
            yield running
        except BaseException:
            for path in sorted(Path(folder).glob("*.log")):
                print(f"{path.name}: {path.read_text()[-1500:]}", file=sys.stderr)
            raise
        finally:
            _end(process)


def _security() -> Any:
    from kvrelay.rpc.security import SecurityConfig

    return SecurityConfig()


def _end(process: "subprocess.Popen[str]") -> None:
    """Ends the supervisor, which ends its members; kills those that are left."""
    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in below:
        if child.is_running():
            child.kill()
