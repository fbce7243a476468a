"""Tokens that tell a session nothing go to an HTTP client without it: they keep all that holds for the others."""

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrelay.internal.v1.worker_pb2 import RelayResponse
from kvrelay.router.faces.http.completions import TextChoice
from kvrelay.v1.inference_pb2 import FINISH_REASON_LENGTH
from support.http_calls import serving, text_of, token_at
from support.router_fakes import FakeWorker, Job, run, until

LONG = {"prompt": "hello", "max_tokens": 20000, "stream": True, "ignore_eos": True}
ENDLESS = 20000


def worker(script: Any, max_context: int = 30000) -> FakeWorker:
    return FakeWorker("colocated-0", "colocated", script, max_context=max_context)


async def endless(job: Job) -> None:
    for index in range(ENDLESS):
        job.send(index, (token_at(index % 50),))
        if index % 200 == 199:
            await asyncio.sleep(0.001)


async def texts(response: aiohttp.ClientResponse) -> list[str]:
    """The text of each event, up to the end of the stream or an error, which comes last."""
    found = []
    async for line in response.content:
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            found.append(event["choices"][0]["text"] if "choices" in event else f"error: {event['error']['message']}")
    return found


@pytest.mark.parametrize("coalesce_ms", [0.0, 10.0])
def test_streams_side_by_side_have_their_own_tokens_in_order(tmp_path: Path, coalesce_ms: float) -> None:
    """One message has tokens of all of them, as a worker's step has."""
    streams, tokens = 12, 60

    async def steps(job: Job) -> None:
        jobs = job.worker.jobs
        if len(jobs) < streams:
            return
        for index in range(tokens - 1):
            message = RelayResponse()
            for at, each in enumerate(jobs):
                message.slots.append(each.submit.slot)
                message.indices.append(index)
                message.token_ids.append(token_at((index + at) % 50))
            job.stream.put_nowait(message)
            await asyncio.sleep(0.002 if index % 7 else 0)
        for at, each in enumerate(jobs):
            each.send(tokens - 1, (token_at((tokens - 1 + at) % 50),), FINISH_REASON_LENGTH)

    async def test() -> None:
        async with serving(tmp_path, worker(steps), coalesce_ms=coalesce_ms) as (cluster, http):
            body = {**LONG, "max_tokens": tokens}

            async def one() -> str:
                async with http.session.post(http.base + "/v1/completions", json=body) as response:
                    return "".join(await texts(response))

            got = await asyncio.gather(*(one() for _ in range(streams)))
            due = [text_of([token_at((index + at) % 50) for index in range(tokens)]) for at in range(streams)]
            assert sorted(got) == sorted(due)
            assert [record.completion_tokens for record in cluster.records] == [tokens] * streams

    run(test)


def test_a_client_that_does_not_read_is_given_up(tmp_path: Path) -> None:
    async def test() -> None:
        # Each event has the model's name, so that the events fill the system's buffers.
        options = {"idle_timeout_seconds": 0.3, "coalesce_ms": 0.0, "served_model_name": ("m" * 1000,)}
        async with serving(tmp_path, worker(endless), **options) as (cluster, http):
            host, _, port = http.base.removeprefix("http://").rpartition(":")
            with socket.socket() as client:
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

    run(test)


def test_a_client_that_leaves_frees_the_worker_while_tokens_come(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, worker(endless)) as (cluster, http):
            response = await http.session.post(http.base + "/v1/completions", json=LONG)
            await response.content.readline()
            response.close()
            await asyncio.wait_for((await cluster.job("colocated-0")).cancelled.wait(), 20)
            await until(lambda: cluster.router._front.running == 0, "nothing runs")
            assert cluster.records[0].outcome == "cancelled"

    run(test)


def test_a_worker_that_falls_silent_is_given_up_after_its_last_token(tmp_path: Path) -> None:
    """Each token counts as a sign of life."""
    idle = 0.5

    async def falls_silent(job: Job) -> None:
        if len(job.worker.jobs) > 1:
            for index in range(job.base, job.submit.sampling.max_tokens - 1):
                job.send(index, (token_at(index),))
            job.send(index + 1, (token_at(index + 1),), FINISH_REASON_LENGTH)
            return
        until_ = time.monotonic() + 2 * idle
        index = 0
        while time.monotonic() < until_ and index < 30:
            job.send(index, (token_at(index),))
            index += 1
            await asyncio.sleep(idle / 10)

    async def test() -> None:
        async with serving(tmp_path, worker(falls_silent), idle_timeout_seconds=idle) as (cluster, http):
            body = {**LONG, "max_tokens": 40}
            async with http.session.post(http.base + "/v1/completions", json=body) as response:
                assert "".join(await texts(response)) == text_of([token_at(index) for index in range(40)])
            assert cluster.records[0].retries == 1
            assert cluster.records[0].total_seconds >= 2 * idle

    run(test)


def test_a_defect_ends_the_one_request_that_meets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
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

        async with serving(tmp_path, worker(script)) as (cluster, http):
            body = {**LONG, "max_tokens": 30}

            async def one() -> list[str]:
                async with http.session.post(http.base + "/v1/completions", json=body) as response:
                    return await texts(response)

            lucky = asyncio.create_task(one())
            await until(lambda: bool(choices), "the first one has begun")
            *_, last = await one()
            assert last == "error: a defect in the router"
            step.set()
            assert "".join(await lucky) == text_of([token_at(index) for index in range(30)])
            assert [record.outcome for record in cluster.records] == ["internal", "length"]
            await until(lambda: cluster.router._front.running == 0, "nothing runs")

    run(test)
