"""Tokens that tell a session nothing go to an HTTP client without it: they keep all that holds for the others.

A client of gRPC that does not read is here, too: both faces give it up in the same way.
"""

import asyncio
import json
import socket
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from kvrelay.internal.v1.worker_pb2 import RelayResponse
from kvrelay.router.faces.http.completions import TextChoice
from kvrelay.v1.inference_pb2 import FINISH_REASON_LENGTH, GenerateRequest, SamplingParams
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub
from support.http_calls import text_of
from support.router_fakes import FakeCluster, FakeWorker, Job, colocated_of, fake, token_at, tokens, until
from support.scenes import Serve

LONG = {"prompt": "hello", "max_tokens": 20000, "stream": True, "ignore_eos": True}
ENDLESS = 20000


def worker(script: Any, max_context: int = 30000) -> FakeWorker:
    return fake("colocated-0", script, max_context=max_context)


async def endless(job: Job) -> None:
    for index in range(ENDLESS):
        job.send(index, (token_at(index % 50),))
        if index % 200 == 199:
            await asyncio.sleep(0.001)


async def texts(cluster: FakeCluster, tokens: int) -> list[str]:
    """The text of each event of a stream of so many tokens, or up to an error, which comes last."""
    found = []
    url, body = "/v1/completions", {**LONG, "max_tokens": tokens}
    async with cluster.http.session.post(url, json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                found.append(event["choices"][0]["text"] if "choices" in event else f"error: {event['error']}")
    return found


@pytest.mark.parametrize("coalesce_ms", [0.0, 10.0])
async def test_streams_side_by_side_have_their_own_tokens_in_order(serve: Serve, coalesce_ms: float) -> None:
    """One message has tokens of all of them, as a worker's step has."""
    streams, count = 12, 60

    async def steps(job: Job) -> None:
        jobs = job.worker.jobs
        if len(jobs) < streams:
            return
        for index in range(count - 1):
            message = RelayResponse()
            for at, each in enumerate(jobs):
                message.slots.append(each.submit.slot)
                message.indices.append(index)
                message.token_ids.append(token_at((index + at) % 50))
            job.stream.put_nowait(message)
            await asyncio.sleep(0.002 if index % 7 else 0)
        for at, each in enumerate(jobs):
            each.send(count - 1, (token_at((count - 1 + at) % 50),), FINISH_REASON_LENGTH)

    cluster = await serve(worker(steps), coalesce_ms=coalesce_ms)
    got = await asyncio.gather(*(texts(cluster, count) for _ in range(streams)))
    due = [text_of([token_at((index + at) % 50) for index in range(count)]) for at in range(streams)]
    assert sorted(map("".join, got)) == sorted(due)
    assert [record.completion_tokens for record in cluster.records] == [count] * streams


@pytest.mark.parametrize("face", ["http", "grpc"])
async def test_a_client_that_does_not_read_is_given_up(serve: Serve, stack: AsyncExitStack, face: str) -> None:
    # Each event has the model's name, so that the events fill the system's buffers.
    cluster = await serve(worker(endless), idle_timeout_seconds=0.3, coalesce_ms=0.0, served_model_name=("m" * 1000,))
    if face == "grpc":
        options = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(cluster.router.address, options=options))
        sampling = SamplingParams(max_tokens=ENDLESS, ignore_eos=True)
        call = InferenceServiceStub(channel).Generate(GenerateRequest(text="hello", sampling=sampling))
        stack.callback(call.cancel)
        await call.read()
    else:
        host, _, port = cluster.http.base.removeprefix("http://").rpartition(":")
        client = stack.enter_context(socket.socket())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        body = json.dumps(LONG).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        await loop.sock_sendall(client, f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    job = await cluster.job("colocated-0")
    await asyncio.wait_for(job.cancelled.wait(), 20)
    await until(lambda: cluster.records, "a record")
    assert cluster.records[0].completion_tokens < ENDLESS
    assert cluster.records[0].outcome == "cancelled"


async def test_a_worker_that_falls_silent_is_given_up_after_its_last_token(serve: Serve) -> None:
    """Each token counts as a sign of life."""
    idle = 0.5

    async def falls_silent(job: Job) -> None:
        if len(job.worker.jobs) > 1:
            await colocated_of()(job)
        else:
            for index in range(21):
                job.send(index, (token_at(index),))
                await asyncio.sleep(idle / 10)

    cluster = await serve(worker(falls_silent), idle_timeout_seconds=idle)
    assert "".join(await texts(cluster, 40)) == text_of(list(tokens(40)))
    assert cluster.records[0].retries == 1
    assert cluster.records[0].total_seconds >= 2 * idle


async def test_a_defect_ends_the_one_request_that_meets_it(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    add, choices = TextChoice.add, list[TextChoice]()

    def broken(choice: TextChoice, message: Any) -> Any:
        if choice not in choices:
            choices.append(choice)
        if choice.counted[0] == 5 and choice is not choices[0]:
            raise ValueError("broken")
        return add(choice, message)

    monkeypatch.setattr(TextChoice, "add", broken)
    step = asyncio.Event()

    async def script(job: Job) -> None:
        for index in range(29):
            job.send(index, (token_at(index),))
            await asyncio.sleep(0.005)
        await step.wait()
        job.send(29, (token_at(29),), FINISH_REASON_LENGTH)

    cluster = await serve(worker(script))
    lucky = asyncio.create_task(texts(cluster, 30))
    await until(lambda: bool(choices), "the first one has begun")
    *_, last = await texts(cluster, 30)
    assert last.startswith("error: ")
    assert "'a defect in the router'" in last
    step.set()
    assert "".join(await lucky) == text_of(list(tokens(30)))
    assert cluster.outcomes == ["internal", "length"]
    await cluster.idle()
