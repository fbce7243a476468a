"""The real processes of `ratio.py`: supervisor, router, eight workers; and the clients."""

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clusters import plain_cluster
from ratio_simulator import A100_OPT_66B, BLOCK, Job

from kvrelay.client import AsyncClient
from kvrelay.cluster.scaling.config import ScalingConfig
from nemesis.load import Stream, ask
from support.supervised import Supervised, all_ready

REQUEST_SECONDS = 120.0
VOCAB = 250


def set_split(cluster: Supervised, prefill: int) -> None:
    """Gives workers other roles until so many are prefill workers; returns when all are ready."""
    workers = {name: role for name, role in sorted(cluster.desired().items()) if role != "router"}
    surplus = list(workers.values()).count("prefill") - prefill
    role, other = ("prefill", "decode") if surplus > 0 else ("decode", "prefill")
    for name in [name for name in workers if workers[name] == role][: abs(surplus)]:
        cluster.settle(cluster.control.set_role(name, other))
    all_ready(cluster)


async def run(cluster: Supervised, jobs: Sequence[Job]) -> list[str]:
    """Sends each request at its time, and waits for all answers; returns the error of each, or an empty text."""
    began = time.monotonic()
    async with AsyncClient(cluster.member("router-0").member.address) as client, asyncio.TaskGroup() as group:
        asked = []
        for number, job in enumerate(jobs):
            await asyncio.sleep(began + job.arrival - time.monotonic())
            asked.append(group.create_task(_ask(client, number, job, began)))
    return [task.result() for task in asked]


async def _ask(client: AsyncClient, number: int, job: Job, began: float) -> str:
    prompt = tuple(random.Random(number).choices(range(VOCAB), k=job.prompt))
    stream = Stream(f"job-{number}", prompt, job.completion, None, time.monotonic(), seconds=REQUEST_SECONDS)
    await ask(client, stream)
    error = stream.error
    if not error and len(stream.tokens) != job.completion:
        error = f"{len(stream.tokens)} of {job.completion} tokens"
    job.arrival = stream.invoked - began  # this client may have been late itself
    job.first = stream.times[0] - began if stream.times else None
    job.last = None if error else stream.times[-1] - began
    return error


@contextmanager
def cluster(split: tuple[int, int], scaling: ScalingConfig) -> Iterator[Supervised]:
    """A ready cluster with this split; nothing of it is left at the end."""
    engine = {
        "block_size": BLOCK,
        "max_batch_tokens": A100_OPT_66B.max_chunk,
        "max_sequences": A100_OPT_66B.max_streams,
        "prefix_cache": True,
        "threads": 1,
    }
    roles = ["prefill"] * split[0] + ["decode"] * split[1]
    worker = {"model": "pico", "dtype": "float32", "engine": engine}
    members: dict[str, Any] = {
        f"worker-{index}": {"module": "paced_worker", "options": {"role": role, **worker}}
        for index, role in enumerate(roles)
    }
    targets = {name: getattr(scaling, name) for name in ("ttft_target_seconds", "tpot_target_seconds")}
    router = {"model": "pico", "grpc_port": 0, "http_port": None, **targets}
    members["router-0"] = {"module": "kvrelay.router", "options": router}
    # A busy machine may keep a process from its heartbeat.
    patience = {"suspect_seconds": 5.0, "dead_seconds": 15.0}
    with (
        tempfile.TemporaryDirectory(prefix="kvrelay-ratio-") as folder,
        plain_cluster(Path(folder), members, scaling=asdict(scaling), **patience) as running,
    ):
        yield running
