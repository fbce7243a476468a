"""Public streams under load: none ends because a process gets no CPU, and none of very many ends without a reason."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import grpc
import pytest

from kvrelay.v1.inference_pb2 import GenerateRequest, SamplingParams, TokenIds
from support.router_fakes import FakeWorker, Job, colocated_of, length_if, router_process, run, token_at

STARVED_SECONDS = 10.0
CONNECTIONS = 8
PAUSE = 0.25
CLIENT = """
import json, sys
from kvrelay.client import Client
with Client(sys.argv[1]) as client:
    tokens = []
    for chunk in client.generate([5, 6], max_tokens=int(sys.argv[2]), timeout=90):
        tokens += chunk.token_ids
        print("token", flush=True)
    print(json.dumps(tokens), flush=True)
"""


async def slowly(job: Job) -> None:
    end = job.submit.sampling.max_tokens
    for index in range(job.base, end):
        await asyncio.sleep(PAUSE)
        job.send(index, (token_at(index),), length_if(index == end - 1))


@pytest.mark.more
@pytest.mark.parametrize("who", ["client", "router"])
def test_a_stream_survives_ten_seconds_without_cpu(tmp_path: Path, who: str) -> None:
    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", slowly)
        async with router_process(tmp_path, worker) as (address, pid):
            count = int((STARVED_SECONDS + 2) / PAUSE)
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CLIENT, address, str(count), stdout=subprocess.PIPE
            )
            assert client.stdout is not None
            await asyncio.wait_for(client.stdout.readline(), 60)
            stopped = client.pid if who == "client" else pid
            os.kill(stopped, signal.SIGSTOP)
            try:
                await asyncio.sleep(STARVED_SECONDS)  # the fault's duration
            finally:
                os.kill(stopped, signal.SIGCONT)
            out, _ = await asyncio.wait_for(client.communicate(), 60)
            assert client.returncode == 0
            assert json.loads(out.splitlines()[-1]) == [token_at(index) for index in range(count)]

    run(test, seconds=180)


@pytest.mark.parametrize("streams", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.more
def test_thousands_of_streams_at_once_are_served_or_refused_with_a_delay(tmp_path: Path, streams: int) -> None:
    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", colocated_of())
        async with router_process(tmp_path, worker, max_requests=500) as (address, _):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(CONNECTIONS)]
            request = GenerateRequest(token_ids=TokenIds(ids=[5, 6]), sampling=SamplingParams(max_tokens=4))
            data = request.SerializeToString()
            gate = asyncio.Event()

            async def one(number: int) -> str:
                await gate.wait()
                call = channels[number % CONNECTIONS].unary_stream("/kvrelay.v1.InferenceService/Generate")(data)
                try:
                    async for _ in call:
                        pass
                except grpc.aio.AioRpcError as error:
                    delay = dict(error.trailing_metadata() or ()).get("retry-delay-ms")
                    return f"{error.code().name}, retry after {delay} ms"
                return "served"

            tasks = [asyncio.create_task(one(number)) for number in range(streams)]
            started = time.monotonic()
            gate.set()
            ends = Counter(await asyncio.gather(*tasks))
            print(f"{dict(ends)} within {time.monotonic() - started:.1f} s")
            for channel in channels:
                await channel.close()
            assert set(ends) <= {"served", "RESOURCE_EXHAUSTED, retry after 1000 ms"}
            assert ends["served"] >= 500
            assert ends.total() == streams

    run(test, seconds=180)
