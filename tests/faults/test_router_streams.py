"""Public streams under load: none ends because a process gets no CPU, and none of very many ends without a reason."""

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from kvrelay.v1.inference_pb2 import GenerateRequest, SamplingParams, TokenIds
from support.router_fakes import FakeSupervisor, FakeWorker, Job, colocated_of, length_if, model_folder, run, until

STARVED_SECONDS = 10.0
STREAMS = 10_000
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


def token_at(index: int) -> int:
    return 40 + index


async def slowly(job: Job) -> None:
    end = job.submit.sampling.max_tokens
    for index in range(job.base, end):
        await asyncio.sleep(PAUSE)
        job.send(index, (token_at(index),), length_if(index == end - 1))


@asynccontextmanager
async def router_process(folder: Path, worker: FakeWorker, **options: object) -> AsyncIterator[tuple[str, int]]:
    """Address and pid of a router in a process of its own, which has reached the worker."""
    supervisor = FakeSupervisor()
    await supervisor.start()
    await worker.start()
    config = folder / "router.json"
    settings = {"model": str(model_folder(folder / "model")), "grpc_port": 0, **options}
    config.write_text(json.dumps(settings | {"supervisor": f"127.0.0.1:{supervisor.port}"}))
    command = [sys.executable, "-m", "kvrelay.router", "--config", str(config)]
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


def burn(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.parametrize("starved", ["client stopped", "router stopped", "both without CPU"])
def test_a_stream_survives_ten_seconds_without_cpu(tmp_path: Path, starved: str) -> None:
    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", slowly)
        async with router_process(tmp_path, worker) as (address, pid):
            count = int((STARVED_SECONDS + 2) / PAUSE)
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CLIENT, address, str(count), stdout=subprocess.PIPE
            )
            assert client.stdout is not None
            await asyncio.wait_for(client.stdout.readline(), 60)
            burners: list[multiprocessing.Process] = []
            stopped = {"client stopped": [client.pid], "router stopped": [pid]}.get(starved, [])
            try:
                for process in stopped:
                    os.kill(process, signal.SIGSTOP)
                if not stopped:
                    for process in (client.pid, pid):
                        os.setpriority(os.PRIO_PROCESS, process, 19)
                    cores = 2 * (os.cpu_count() or 1)
                    context = multiprocessing.get_context("fork")
                    burners = [context.Process(target=burn, args=(STARVED_SECONDS,)) for _ in range(cores)]  # type: ignore[misc]  # a Process all the same
                    for burner in burners:
                        burner.start()
                await asyncio.sleep(STARVED_SECONDS)  # the fault's duration
            finally:
                for process in stopped:
                    os.kill(process, signal.SIGCONT)
                for burner in burners:
                    burner.join()
            out, _ = await asyncio.wait_for(client.communicate(), 60)
            assert client.returncode == 0
            assert json.loads(out.splitlines()[-1]) == [token_at(index) for index in range(count)]

    run(test, seconds=180)


def test_ten_thousand_streams_at_once_are_served_or_refused_with_a_delay(tmp_path: Path) -> None:
    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", colocated_of(token_at))
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

            tasks = [asyncio.create_task(one(number)) for number in range(STREAMS)]
            started = time.monotonic()
            gate.set()
            ends = Counter(await asyncio.gather(*tasks))
            print(f"{dict(ends)} within {time.monotonic() - started:.1f} s")
            for channel in channels:
                await channel.close()
            assert set(ends) <= {"served", "RESOURCE_EXHAUSTED, retry after 1000 ms"}
            assert ends["served"] >= 500
            assert ends.total() == STREAMS

    run(test, seconds=180)
