"""Tokens gather into fewer messages while there are many streams: all of them come, in order, and none waits long."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import pytest

from kvrelay.internal.v1.worker_pb2 import Failure
from kvrelay.router.session.attempt import AttemptTokens
from kvrelay.router.session.pacer import AT_ONCE, STREAM_SECONDS, UNPACED_TOKENS, Pacer
from support.router_fakes import FakeCluster, Job, first_attempt, length_if, pair, token_at, tokens, until
from support.scenes import Serve

TOTAL = 48


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream has the pace of many."""
    monkeypatch.setattr("kvrelay.router.session.pacer.STREAM_SECONDS", 60.0)


async def messages(cluster: FakeCluster) -> list[tuple[int, ...]]:
    """The tokens of each message of a stream, which has all of them."""
    seen = [chunk.token_ids async for chunk in cluster.client.generate("hello", max_tokens=TOTAL)]
    assert tuple(token for each in seen for token in each) == tokens(TOTAL)
    return seen


@pytest.mark.parametrize("many", [False, True])
async def test_all_tokens_come_in_order_and_in_fewer_messages_if_there_are_many_streams(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, many: bool
) -> None:
    if many:
        request.getfixturevalue("crowded")
    counted = Counter[str]()

    def counting(name: str) -> Callable[[Pacer, str], None]:
        method = getattr(Pacer, name)

        def counted_one(pacer: Pacer, holder: str) -> None:
            counted[name] += 1
            method(pacer, holder)

        return counted_one

    for name in ("begin", "end"):
        monkeypatch.setattr(Pacer, name, counting(name))
    cluster = await serve(*pair(pause=0.002), coalesce_ms=20.0)
    seen = await messages(cluster)
    assert seen[-1] or seen[-2], "the end brings what has gathered"
    if many:
        assert len(seen) < TOTAL / 2
    await cluster.idle()
    assert counted == {"begin": 1, "end": 1}, "counted while it runs"


@pytest.mark.usefixtures("crowded")
async def test_first_tokens_and_the_last_ones_wait_for_nothing(serve: Serve) -> None:
    prefill, decode = pair()
    release = asyncio.Event()

    async def script(job: Job) -> None:
        for index in range(1, TOTAL):
            if index == TOTAL - 1:
                await release.wait()
            job.send(index, (token_at(index),), length_if(index == TOTAL - 1))
            await asyncio.sleep(0.002)

    decode.script = script
    cluster = await serve(prefill, decode)
    cluster.router.front.dispatch.pacer._longest = 600.0  # a pause that outlasts the test
    seen: list[int] = []
    async for chunk in cluster.client.generate("hello", max_tokens=TOTAL):
        seen += chunk.token_ids
        if len(seen) >= UNPACED_TOKENS:
            release.set()
    assert tuple(seen) == tokens(TOTAL), "neither the first tokens nor the last one have waited"


@pytest.mark.usefixtures("crowded")
async def test_what_has_gathered_is_sent_before_another_attempt(serve: Serve) -> None:
    """The next attempt computes no token that the client could have."""
    prefill, decode = pair()

    async def fails(job: Job) -> None:
        for index in range(1, 30):
            job.send(index, (token_at(index),))
        job.fail(Failure.CODE_RETRY)

    decode.script = first_attempt(fails)
    cluster = await serve(prefill, decode, coalesce_ms=1000.0)
    await messages(cluster)
    assert (await cluster.job("prefill-0", 1)).base == 30


async def test_the_pace_grows_with_the_streams_and_no_token_waits_longer_than_allowed() -> None:
    pacer = Pacer(0.02)
    for streams in (1, 10, 100, 10_000):
        pacer.streams = Counter(many=streams)
        assert pacer.seconds("many") == min(0.02, STREAM_SECONDS * streams)
        pacer.begin("few")
        assert pacer.seconds("few") == 2 * STREAM_SECONDS, "it doesn't wait for the other's"
        assert pacer.seconds("many") == min(0.02, 2 * STREAM_SECONDS * streams), "the other has half of the time"
        pacer.end("few")
    began, released = time.monotonic(), dict[int, float]()
    for number in range(200):
        pacer.hold(lambda pause: released.setdefault(pause, time.monotonic()), number)
    await until(lambda: len(released) == 200, "all were released")
    assert list(released) == list(range(200)), "in order"
    assert min(released.values()) >= began + 0.02 - 0.001


async def test_gathered_tokens_go_out_with_the_first_one_after_the_pace_or_by_their_timer() -> None:
    tokens, pacer = AttemptTokens(0, 100, scored=False), Pacer(60.0)

    async def released() -> int:
        """Tokens that go out in the next turns of the event loop."""
        for _ in range(3):
            await asyncio.sleep(0)
        return len(tokens.take().token_ids)

    assert tokens.append(0, 7, 1.0)
    assert await released() == 1
    tokens.pause(2.0, pacer, "")
    for index in (1, 2):
        assert tokens.append(index, 7, 1.5)
    assert await released() == 0
    assert tokens.append(3, 7, 2.0), "the pace is over"
    assert tokens.append(4, 7, 2.5), "before it is its turn"
    assert await released() == 4

    tokens.pause(3.0, pacer, "")
    assert tokens.append(5, 7, 2.5)
    assert await released() == 0, "it has not waited for a minute"
    tokens.flush()
    assert await released() == 1, "nothing gathers after the attempt's failure"

    tokens.pause(time.monotonic() + 60, Pacer(0.001), "")
    assert tokens.append(6, 7, time.monotonic())
    await until(lambda: tokens.take().token_ids == [7], "its timer lets it go")


async def test_a_router_reads_between_the_writes_of_many_streams() -> None:
    pacer, released, turns = Pacer(0.01), 0, 0

    def release(_: int) -> None:
        nonlocal released
        released += 1

    for _ in range(10 * AT_ONCE):
        pacer.due("", release, 1)
    while released < 10 * AT_ONCE:
        before = released
        await asyncio.sleep(0)
        assert released - before <= AT_ONCE
        turns += 1
    assert turns <= 12

    order: list[int] = []
    for number in range(10 * AT_ONCE):
        pacer.due("many", order.append, number)
    pacer.due("few", order.append, -1)
    await asyncio.sleep(0)
    assert order[:3] == [0, -1, 1], "holders take turns"
