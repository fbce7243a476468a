"""Calls a router over scripted workers by HTTP, as OpenAI's clients do."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from kvrelay.internal.v1.worker_pb2 import PrefillReport
from kvrelay.v1.inference_pb2 import FINISH_REASON_STOP
from support.router_fakes import FakeCluster, FakeWorker, Job, fake_cluster, pair
from support.tokenizers import byte_level_tokenizer

HELLO = {"prompt": "hello", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def token_at(index: int) -> int:
    return 40 + index


class Http:
    """Calls a router."""

    def __init__(self, session: aiohttp.ClientSession, address: str, scheme: str = "http") -> None:
        self.session = session
        self.base = f"{scheme}://{address}"

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


@asynccontextmanager
async def serving(
    folder: Path, *workers: FakeWorker, headers: dict[str, str] | None = None, **config: Any
) -> AsyncIterator[tuple[FakeCluster, Http]]:
    async with (
        fake_cluster(folder, *(workers or pair(token_at)), http_port=0, **config) as cluster,
        aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(30)) as session,
    ):
        assert cluster.router.http_address
        yield cluster, Http(session, cluster.router.http_address)


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
