"""A router without workers: it answers in capitals, and keeps what it was asked."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
from anyio.from_thread import start_blocking_portal

from kvrelay.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    GenerateRequest,
    GenerateResponse,
    GetModelInfoRequest,
    GetModelInfoResponse,
    Timeline,
    Usage,
)
from kvrelay.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server

SECONDS = 30.0


class CapitalRouter(InferenceServiceServicer):
    """Answers with the prompt, or the last message, in capitals. The prompt `wait` keeps the stream open, and `full` is
    refused."""

    def __init__(self, *, has_chat_template: bool = True) -> None:
        self._has_chat_template = has_chat_template
        self.requests: list[GenerateRequest] = []
        self.ended = threading.Event()

    async def Generate(self, request: GenerateRequest, context: Any) -> Any:
        self.requests.append(request)
        messages = request.messages.messages
        text = messages[-1].content if messages else request.text
        if text == "":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "text is ''; allowed: at least 1 character")
        if text == "full":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "1024 requests are in flight")
        try:
            for index in reversed(range(1, request.n)):
                yield GenerateResponse(text=f"{text} {index}", index=index)
                yield GenerateResponse(index=index, finish_reason=FINISH_REASON_LENGTH, timeline=Timeline())
            for character in text:
                yield GenerateResponse(text=character.upper(), token_ids=[ord(character)])
            if text == "wait":
                await asyncio.sleep(2 * SECONDS)
        finally:
            self.ended.set()
        yield GenerateResponse(
            request_id=request.request_id,
            finish_reason=FINISH_REASON_STOP if messages else FINISH_REASON_LENGTH,
            usage=Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1),
            timeline=Timeline(queue_seconds=0.001, transfer_seconds=0.002, transfer_bytes=4_000_000),
        )

    async def GetModelInfo(self, request: GetModelInfoRequest, context: Any) -> GetModelInfoResponse:
        return GetModelInfoResponse(name="capitals", has_chat_template=self._has_chat_template)


@asynccontextmanager
async def _served(router: CapitalRouter) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_InferenceServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0.2)


@contextmanager
def serving(router: CapitalRouter) -> Iterator[str]:
    """Runs the router in a thread; host:port."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(_served(router)) as address:
        yield address
