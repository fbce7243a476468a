"""A stream whose router goes away continues at another router, or at the same one when it is back."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from kvrelay.client import AsyncClient, Cancelled, Chunk, Client, Unavailable
from kvrelay.router.server import RouterServer
from support.router_fakes import Job, colocated_of, fake, second_router, tokens, until
from support.scenes import Serve
from support.tokenizers import byte_level_tokenizer

COUNT = 12
TEXT = byte_level_tokenizer().decode(tokens(COUNT))
Start = Callable[[], Awaitable[list[RouterServer]]]


async def halting(job: Job) -> None:
    """The first call gets three tokens; later ones all."""
    if job.submit.client_call.call > 1:
        await colocated_of()(job)
    else:
        job.send(0, tokens(3))


@pytest.fixture
def two_routers(serve: Serve, stack: AsyncExitStack) -> Start:
    """Starts two routers over a worker that halts."""

    async def start() -> list[RouterServer]:
        cluster = await serve(fake("colocated-0", halting))
        return [cluster.router, await stack.enter_async_context(second_router(cluster))]

    return start


def user_of(routers: list[RouterServer]) -> RouterServer:
    """The router that has a stream."""
    (router,) = (router for router in routers if router.running)
    return router


def whole(chunks: list[Chunk]) -> int:
    """Checks that the stream has all of its tokens and its text; returns the number of its calls after the first."""
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == tokens(COUNT)
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    usage, timeline = chunks[-1].usage, chunks[-1].timeline
    assert usage is not None
    assert timeline is not None
    assert (usage.completion_tokens, timeline.retries) == (COUNT, 0)
    return timeline.resumes


async def test_an_async_stream_goes_on_at_the_other_router(two_routers: Start) -> None:
    routers = await two_routers()
    async with AsyncClient([router.address for router in routers]) as client:
        stream = client.generate("hello", max_tokens=COUNT)
        chunks = [await anext(stream)]
        await user_of(routers).stop(0.0)
        chunks += [chunk async for chunk in stream]
        assert whole(chunks) == 1
        assert (await client.model_info()).max_context == 64
        assert await client.detokenize(await client.tokenize("hello")) == "hello"


async def test_a_blocking_stream_goes_on_at_the_other_router(two_routers: Start) -> None:
    routers = await two_routers()
    with Client(",".join(router.address for router in routers)) as client:
        stream = client.generate("hello", max_tokens=COUNT)
        chunks = [await asyncio.to_thread(next, stream)]
        await user_of(routers).stop(0.0)
        chunks += await asyncio.to_thread(list, stream)
        assert whole(chunks) == 1
        assert (await asyncio.to_thread(client.complete, "hello", max_tokens=3)).token_ids == tokens(3)
        assert await asyncio.to_thread(client.tokenize, "hello")


async def test_with_one_address_a_stream_goes_on_when_its_router_is_back(serve: Serve) -> None:
    cluster = await serve(fake("colocated-0", halting))
    config = replace(cluster.router.config, grpc_port=int(cluster.router.address.rpartition(":")[2]))
    with Client(cluster.router.address) as client:
        stream = client.generate("hello", max_tokens=COUNT)
        chunks = [await asyncio.to_thread(next, stream)]
        await cluster.router.stop(0.0)
        reading = asyncio.create_task(asyncio.to_thread(list, stream))
        again = RouterServer(config)
        await again.start()
        try:
            # It may refuse calls with "no worker is ready yet" at first.
            assert whole(chunks + await reading) >= 1
        finally:
            await again.stop(0.0)


async def test_a_client_that_is_closed_continues_nothing(two_routers: Start) -> None:
    addresses = [router.address for router in await two_routers()]
    client, patient = Client(addresses), AsyncClient(addresses)
    blocked, stream = client.generate("hello", max_tokens=COUNT), patient.generate("hello", max_tokens=COUNT)
    await asyncio.gather(asyncio.to_thread(next, blocked), anext(stream))
    waiting = [asyncio.create_task(asyncio.to_thread(next, blocked)), asyncio.ensure_future(anext(stream))]
    client.close()
    await patient.close()
    for one in waiting:
        with pytest.raises(Cancelled):
            await asyncio.wait_for(one, 20)
    with pytest.raises(Cancelled, match="the client is closed"):
        client.generate("hello")


async def test_a_stream_is_given_up_in_time_and_can_be_closed_while_it_waits(serve: Serve) -> None:
    cluster = await serve(fake("colocated-0", halting))
    worker, address = cluster.workers["colocated-0"], cluster.router.address
    async with AsyncClient(address, resume_seconds=1.0) as impatient, AsyncClient(address) as patient:
        with Client(address) as client:
            given_up, closed = impatient.generate("hello"), patient.generate("hello")
            blocked = client.generate("hello")
            await asyncio.gather(anext(given_up), anext(closed), asyncio.to_thread(next, blocked))
            await until(lambda: len(worker.jobs) == 3, "all run")
            await cluster.router.stop(0.0)
            started = asyncio.get_running_loop().time()
            waiting = [asyncio.create_task(asyncio.to_thread(next, blocked)), asyncio.ensure_future(anext(closed))]
            with pytest.raises(Unavailable):
                await anext(given_up)
            assert 1.0 <= asyncio.get_running_loop().time() - started < 20, "not after the usual 30 s"
            assert not any(task.done() for task in waiting)
            blocked.close()
            await closed.aclose()
            for one in waiting:
                with pytest.raises(Cancelled):
                    await asyncio.wait_for(one, 20)
