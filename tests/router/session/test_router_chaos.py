"""Many requests while workers die, come back, refuse, repeat themselves and overtake each other: no token is lost."""

import asyncio
import random

import pytest

from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD
from kvrelay.internal.v1.worker_pb2 import PHASE_COLOCATED, Failure, TransferReport
from kvrelay.router.session.budget import RetryBudget
from kvrelay.router.session.suspects import Suspicion
from support.router_fakes import FakeCluster, FakeWorker, Job, Script, fake, length_if
from support.scenes import Serve

REQUESTS = 60
KILLS = 6


def token_at(job: Job, index: int) -> int:
    """Depends on the prompt, so that a token of another request shows."""
    return (job.submit.token_ids[0] * 31 + index * 7) % 398 + 2


def prefill_script(source: random.Random) -> Script:
    async def script(job: Job) -> None:
        await asyncio.sleep(source.uniform(0, 0.02))
        if source.random() < 0.03:
            job.fail(Failure.CODE_RETRY)
            return
        last = job.base + 1 == job.submit.sampling.max_tokens
        job.send(job.base, (token_at(job, job.base),), length_if(last))
        await asyncio.sleep(source.uniform(0, 0.02))
        job.send(transfer=TransferReport(transfer_bytes=1))

    return script


def decode_script(source: random.Random) -> Script:
    async def script(job: Job) -> None:
        end = job.submit.sampling.max_tokens
        # Without a prefill worker it computes the prompt too, and sends the first token itself.
        at = job.base + (job.submit.phase != PHASE_COLOCATED)
        while at < end:
            await asyncio.sleep(source.uniform(0, 0.01))
            if source.random() < 0.01:
                job.fail(Failure.CODE_RETRY)
                return
            first = max(job.base, at - source.randrange(2))
            to = min(end, at + source.randrange(1, 4))
            tokens = tuple(token_at(job, index) for index in range(first, to))
            job.send(first, tokens, length_if(to == end))
            at = to

    return script


async def kill_and_replace(cluster: FakeCluster, source: random.Random) -> None:
    """Kills a worker at random, announces the death now and then, and brings another incarnation of it."""
    name = source.choice(sorted(cluster.workers))
    old = cluster.workers[name]
    new = FakeWorker(name, old.role, old.script)
    await old.stop()
    if source.random() < 0.5:
        cluster.announce(**{name.replace("-", "_"): MEMBER_STATE_DEAD})
    await asyncio.sleep(source.uniform(0, 0.1))
    await new.start()
    cluster.workers[name] = new
    cluster.announce()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.more) for seed in (2, 3))])
async def test_every_stream_is_whole(serve: Serve, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Suspicion and the retry budget have tests of their own: here a request may meet any number of kills that it hasn't
    # caused, and the first ones any number of refusals.
    monkeypatch.setattr(Suspicion, "lost", lambda self, tokens, tried: False)
    monkeypatch.setattr(RetryBudget, "take", lambda self: True)
    source = random.Random(seed)

    workers = [fake(f"prefill-{index}", prefill_script(source)) for index in range(2)]
    workers += [fake(f"decode-{index}", decode_script(source)) for index in range(3)]
    cluster = await serve(*workers, max_attempts=20)

    async def request(number: int) -> None:
        await asyncio.sleep(source.uniform(0, 1.0))
        count = source.randrange(2, 40)
        completion = await cluster.client.complete([number + 2, 5], max_tokens=count, timeout=30)
        expected = [((number + 2) * 31 + index * 7) % 398 + 2 for index in range(count)]
        assert list(completion.token_ids) == expected

    running = [asyncio.create_task(request(number)) for number in range(REQUESTS)]
    for _ in range(KILLS):
        await asyncio.sleep(source.uniform(0.05, 0.2))
        await kill_and_replace(cluster, source)
    await asyncio.gather(*running)
    assert len(cluster.records) == REQUESTS
    assert sum(record.retries for record in cluster.records) > 0
    await cluster.ready(*cluster.workers)
    assert all(view.outstanding_tokens == 0 for view in cluster.router.registry.view())
    for worker in cluster.workers.values():
        await worker.stop()
