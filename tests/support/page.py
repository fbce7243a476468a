"""Workers whose steps a test releases one by one, and the page's stream as a test reads it."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from kvrelay.internal.v1.worker_pb2 import Blocks, Load, PrefillReport, Requests, TransferReport
from support.router_fakes import FakeWorker, Job, after, decode_of, length_if

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
