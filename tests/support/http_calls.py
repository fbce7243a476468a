"""Calls a router over scripted workers by HTTP, as OpenAI's clients or the page do, or with any bytes; and workers
whose steps a test releases one by one.
"""

import asyncio
import json
import re
import ssl
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import aiohttp

from kvrelay.internal.v1.worker_pb2 import Blocks, Load, PrefillReport, Requests, TransferReport
from kvrelay.v1.inference_pb2 import FINISH_REASON_STOP
from support.router_fakes import FakeWorker, Job, after, decode_of, length_if
from support.tokenizers import byte_level_tokenizer

HELLO = {"prompt": "hello", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def fetched(url: str, body: dict[str, Any] | None = None, seconds: float = 60.0, **headers: str) -> str:
    """What a server in another process answers, to a POST if there is a body; an error is raised."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=seconds) as response:
        return str(response.read().decode())


def text_of(tokens: list[int]) -> str:
    return str(byte_level_tokenizer().decode(tokens))


def writer_of(text: str, sizes: int = 1) -> Callable[[Job], Any]:
    """A co-located worker that writes a text, `sizes` tokens at a time, and stops."""

    async def script(job: Job) -> None:
        tokens = byte_level_tokenizer().encode(text).ids
        job.send(prefill=PrefillReport(cached_tokens=2))
        for at in range(0, len(tokens), sizes):
            job.send(at, tuple(tokens[at : at + sizes]))
        job.send(len(tokens), (1,), FINISH_REASON_STOP)

    return script


def usage_of(prompt: int, completion: int, cached: int, reasoning: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


MAY_ANSWER = {200, 400, 401, 403, 404, 405, 408, 413, 417, 429, 503, 504}
"""Statuses of which none is a defect's."""


def answers_of(data: bytes) -> list[tuple[int, bytes, bytes]]:
    """Status, head and body of each answer to what was sent over one connection."""
    found = []
    while data:
        head, separator, rest = data.partition(b"\r\n\r\n")
        assert separator, data[:200]
        status = int(head.split(b" ", 2)[1])
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        if status == 100:
            data = rest
            continue
        body, data = (rest, b"") if length is None else (rest[: int(length[1])], rest[int(length[1]) :])
        found.append((status, head, body))
    return found


def check_answers(answers: list[tuple[int, bytes, bytes]]) -> None:
    """Each is no defect's; an error is short, and in OpenAI's form."""
    for status, head, body in answers:
        assert status in MAY_ANSWER, (status, body[:500])
        if status >= 400 and b'"ready"' not in body:
            assert len(body) <= 2048
            assert b"application/json" in head
            error = json.loads(body)["error"]
            assert error["message"]
            assert error.keys() == {"message", "type", "param", "code"}


async def exchange(
    address: str, request: bytes, *, half_close: bool, tls: ssl.SSLContext | None = None
) -> list[tuple[int, bytes, bytes]]:
    """Sends bytes, and reads until the router closes the connection."""
    reader, writer = await asyncio.open_connection(*address.split(":"), ssl=tls)
    try:
        writer.write(request)
        if half_close:
            writer.write_eof()
        answer = b""
        with suppress(ConnectionError):
            while part := await asyncio.wait_for(reader.read(2**16), 10):
                answer += part
        return answers_of(answer)
    finally:
        writer.close()


BYTES = 123_456


class Steps:
    """The steps of one request: two chunks of the prompt, the first token, the KV's arrival, and decode."""

    def __init__(self) -> None:
        self.computed, self.first, self.arrived, self.decoded = (asyncio.Event() for _ in range(4))

    def all(self) -> None:
        for each in (self.computed, self.first, self.arrived, self.decoded):
            each.set()

    async def prefill(self, job: Job) -> None:
        await self.computed.wait()
        job.send(computed_tokens=3)
        await self.first.wait()
        report = PrefillReport(queue_seconds=0.001, prefill_seconds=0.002, cached_tokens=1)
        job.send(job.base, (40,), length_if(job.submit.sampling.max_tokens == 1), prefill=report)
        await self.arrived.wait()
        if job.submit.HasField("peer"):
            job.send(transfer=TransferReport(transfer_seconds=0.003, handoff_seconds=0.001, transfer_bytes=BYTES))

    async def decode(self, job: Job) -> None:
        await after(self.decoded, decode_of())(job)

    def workers(self) -> tuple[FakeWorker, FakeWorker]:
        """A prefill and a decode worker that take these steps for every request."""
        return FakeWorker("prefill-0", "prefill", self.prefill), FakeWorker("decode-0", "decode", self.decode)


def load(**held: int) -> Load:
    """A load report of a pool of 100 blocks."""
    blocks = Blocks(total=100, size=16, held=held.get("held", 0), cached=held.get("cached", 0))
    blocks.free = 100 - blocks.held - blocks.cached
    return Load(blocks=blocks, requests=Requests(running=held.get("running", 0), free_slots=8), computed_tokens=1000)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    """The server-sent events of a response: name and value."""
    name = ""
    async for line in response.content:
        field, _, value = line.decode().strip().partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)
