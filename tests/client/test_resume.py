"""A stream whose router goes away continues at another router, or at the same one when it is back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient, Cancelled, Chunk, Client, Unavailable
from kvrelay.router.server import RouterServer
from support.router_fakes import (
    FakeCluster,
    FakeWorker,
    Job,
    colocated_of,
    fake_cluster,
    run,
    second_router,
    silent,
    until,
)
from support.tokenizers import byte_level_tokenizer

COUNT = 12
TEXT = byte_level_tokenizer().decode([40 + index for index in range(COUNT)])


def token_at(index: int) -> int:
    return 40 + index


TOKENS = tuple(map(token_at, range(COUNT)))


async def halting(job: Job) -> None:
    """The first call gets three tokens; later ones all."""
    if job.submit.client_call.call > 1:
        await colocated_of(token_at)(job)
    else:
        job.send(0, TOKENS[:3])


@asynccontextmanager
async def two_routers(folder: Path) -> AsyncIterator[tuple[FakeCluster, list[RouterServer]]]:
    worker = FakeWorker("colocated-0", "colocated", halting)
    async with fake_cluster(folder, worker) as cluster, second_router(cluster) as second:
        yield cluster, [cluster.router, second]


def user_of(routers: list[RouterServer]) -> RouterServer:
    """The router that has a stream."""
    (router,) = (router for router in routers if router.running)
    return router


def whole(chunks: list[Chunk]) -> int:
    """Checks that the stream has all of its tokens and its text; returns the number of its calls after the first."""
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == TOKENS
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    usage, timeline = chunks[-1].usage, chunks[-1].timeline
    assert usage is not None
    assert timeline is not None
    assert (usage.completion_tokens, timeline.retries) == (COUNT, 0)
    return timeline.resumes


def test_an_async_stream_goes_on_at_the_other_router(tmp_path: Path) -> None:
    async def test() -> None:
        async with two_routers(tmp_path) as (_, routers), AsyncClient([router.address for router in routers]) as client:
            stream = client.generate("hello", max_tokens=COUNT)
            chunks = [await anext(stream)]
            await user_of(routers).stop(0.0)
            chunks += [chunk async for chunk in stream]
            assert whole(chunks) == 1
            assert (await client.model_info()).max_context == 64
            assert await client.detokenize(await client.tokenize("hello")) == "hello"

    run(test)


def test_a_blocking_stream_goes_on_at_the_other_router(tmp_path: Path) -> None:
    async def test() -> None:
        async with two_routers(tmp_path) as (_, routers):
            with Client(",".join(router.address for router in routers)) as client:
                stream = client.generate("hello", max_tokens=COUNT)
                chunks = [await asyncio.to_thread(next, stream)]
                await user_of(routers).stop(0.0)
                chunks += await asyncio.to_thread(list, stream)
                assert whole(chunks) == 1
                assert (await asyncio.to_thread(client.complete, "hello", max_tokens=3)).token_ids == TOKENS[:3]
                assert await asyncio.to_thread(client.tokenize, "hello")

    run(test)


def test_with_one_address_a_stream_goes_on_when_its_router_is_back(tmp_path: Path) -> None:
    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", halting)
        async with fake_cluster(tmp_path, worker) as cluster:
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

    run(test)


def test_a_client_that_is_closed_continues_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with two_routers(tmp_path) as (_, routers):
            addresses = [router.address for router in routers]
            client, patient = Client(addresses), AsyncClient(addresses)
            blocked, stream = client.generate("hello", max_tokens=COUNT), patient.generate("hello", max_tokens=COUNT)
            await asyncio.gather(asyncio.to_thread(next, blocked), anext(stream))
            waiting = [asyncio.create_task(asyncio.to_thread(next, blocked)), asyncio.ensure_future(anext(stream))]
            client.close()
            await patient.close()
            for one in waiting:
                with pytest.raises(Cancelled):
                    await asyncio.wait_for(one, 5)
            with pytest.raises(Cancelled, match="the client is closed"):
                client.generate("hello")

    run(test)


@pytest.mark.parametrize("blocking", [False, True])
def test_a_stream_is_given_up_in_time_and_can_be_closed_while_it_waits(tmp_path: Path, blocking: bool) -> None:
    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", silent)
        async with fake_cluster(tmp_path, worker) as cluster:
            worker.script = halting
            clock = asyncio.get_running_loop().time
            address = cluster.router.address
            async with AsyncClient(address, resume_seconds=1.0) as impatient, AsyncClient(address) as patient:
                given_up, closed = impatient.generate("hello"), patient.generate("hello")
                with Client(address) as client:
                    blocked = client.generate("hello")
                    await asyncio.gather(anext(given_up), anext(closed), asyncio.to_thread(next, blocked))
                    await until(lambda: len(worker.jobs) == 3, "all run")
                    await cluster.router.stop(0.0)
                    started = clock()
                    waiting = asyncio.create_task(
                        asyncio.to_thread(next, blocked) if blocking else anext(closed)  # type: ignore[arg-type]  # an awaitable
                    )
                    with pytest.raises(Unavailable):
                        await anext(given_up)
                    assert 1.0 <= clock() - started < 5
                    assert not waiting.done()
                    if blocking:
                        blocked.close()
                    await closed.aclose()
                    with pytest.raises(Cancelled):
                        await asyncio.wait_for(waiting, 5)

    run(test)
