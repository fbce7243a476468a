"""The real processes of `ratio.py`: supervisor, router, eight workers; and the clients."""

import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Members of the cluster find their modules there, and every process has the token: internal calls need one.
sys.path.append(str(HERE.parent / "tests"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
os.environ.setdefault("KVRELAY_JOIN_TOKEN", "the-token-of-this-benchmark")

import grpc  # noqa: E402  # after the path
from ratio_simulator import BLOCK, Job  # noqa: E402
from ratio_worker import TABLE  # noqa: E402

from kvrelay.cluster.scaling.config import ScalingConfig  # noqa: E402
from kvrelay.rpc.options import channel_options  # noqa: E402
from kvrelay.v1.inference_pb2 import GenerateRequest, SamplingParams, TokenIds  # noqa: E402
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub  # noqa: E402
from support.supervised import Supervised, all_ready, supervised  # noqa: E402

REQUEST_SECONDS = 120.0
VOCAB = 250


@dataclass(slots=True)
class Answer:
    """Tokens and error that a client has seen of one request."""

    job: Job
    tokens: int = 0
    error: str = ""


def set_split(cluster: Supervised, prefill: int) -> None:
    """Gives workers other roles until so many are prefill workers; returns when all are ready."""
    workers = {name: role for name, role in sorted(cluster.desired().items()) if role != "router"}
    surplus = list(workers.values()).count("prefill") - prefill
    role, other = ("prefill", "decode") if surplus > 0 else ("decode", "prefill")
    for name in [name for name in workers if workers[name] == role][: abs(surplus)]:
        cluster.settle(cluster.control.set_role(name, other))
    all_ready(cluster)


async def run(cluster: Supervised, jobs: Sequence[Job]) -> list[Answer]:
    """Sends each request at its time, and waits for all answers."""
    router = cluster.member("router-0").member.address
    async with grpc.aio.insecure_channel(router, options=channel_options()) as channel:
        stub, began = InferenceServiceStub(channel), time.monotonic()
        answers = [Answer(job) for job in jobs]
        async with asyncio.TaskGroup() as group:
            for number, answer in enumerate(answers):
                await asyncio.sleep(began + answer.job.arrival - time.monotonic())
                group.create_task(_ask(stub, number, answer, began))
        return answers


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
def cluster(split: tuple[int, int], scaling: ScalingConfig) -> Iterator[Supervised]:
    """A ready cluster with this split; nothing of it is left at the end."""
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
        f"worker-{index}": {"module": "ratio_worker", "options": {"role": role, **worker}}
        for index, role in enumerate(roles)
    }
    targets = {name: getattr(scaling, name) for name in ("ttft_target_seconds", "tpot_target_seconds")}
    router = {"model": "pico", "grpc_port": 0, "http_port": None, **targets}
    members["router-0"] = {"module": "kvrelay.router", "options": router}
    # A busy machine may keep a process from its heartbeat.
    patience = {"suspect_seconds": 5.0, "dead_seconds": 15.0}
    with (
        tempfile.TemporaryDirectory(prefix="kvrelay-ratio-") as folder,
        supervised(Path(folder), members, scaling=asdict(scaling), **patience) as running,
    ):
        all_ready(running)
        yield running
