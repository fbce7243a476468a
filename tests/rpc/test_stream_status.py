"""A stream call that is written to while its other end ends it ends with the other end's status."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import grpc
import pytest

from kvrelay.rpc.stream_status import peer_status

HOST = "127.0.0.1"
CALLS = 40
Context = grpc.aio.ServicerContext[bytes, bytes]
Serve = Callable[[AsyncIterator[bytes], Context], Awaitable[None]]


async def refuse(requests: AsyncIterator[bytes], context: Context) -> None:
    await anext(requests)
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message is wrong")


async def end(requests: AsyncIterator[bytes], context: Context) -> None:
    await anext(requests)


async def break_down(requests: AsyncIterator[bytes], context: Context) -> None:
    await anext(requests)
    await context.abort(grpc.StatusCode.INTERNAL, "a defect")


@pytest.mark.parametrize(
    ("serve", "told"),
    [
        (refuse, (grpc.StatusCode.INVALID_ARGUMENT, "the first message is wrong")),
        (end, None),
        (break_down, (grpc.StatusCode.INTERNAL, "a defect")),
    ],
)
@pytest.mark.parametrize("nbytes", [10, 1_000_000])
async def test_a_write_that_meets_the_end_does_not_hide_the_status(
    stack: AsyncExitStack, serve: Serve, told: tuple[grpc.StatusCode, str] | None, nbytes: int
) -> None:
    server = grpc.aio.server()
    handlers = {"Serve": grpc.stream_stream_rpc_method_handler(serve)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Ends", handlers),))
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    stack.push_async_callback(server.stop, None)
    met = 0

    async def write(call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        nonlocal met
        with suppress(asyncio.InvalidStateError):
            try:
                while True:
                    await call.write(bytes(nbytes))
            except grpc.aio.AioRpcError:
                met += 1

    async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
        for _ in range(CALLS):
            call = channel.stream_stream("/Ends/Serve", None, None)(None)
            writing = asyncio.create_task(write(call), name="writer")
            found = None
            try:
                with peer_status(call):
                    async for _ in call:
                        pass
            except grpc.aio.AioRpcError as error:
                found = error.code(), error.details()
            await writing
            assert found == told
    assert met, "no write has met the end of its call"
