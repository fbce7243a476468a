"""Blame for a failed attempt: a request pays for its own fault only, never for a worker that is lost, stops or is
ill."""

import asyncio
from typing import Any

import pytest

from kvrelay.client import Completion, InternalError, Unavailable
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_SUSPECT
from kvrelay.internal.v1.worker_pb2 import Failure, PeerRef
from support.router_fakes import (
    FakeCluster,
    FakeWorker,
    Job,
    Script,
    after,
    colocated_of,
    decode_of,
    fake,
    prefill_of,
    silent,
    token_at,
    until,
)
from support.scenes import Serve

REQUESTS = 30
"""Requests that run at once; the retry budget allows fewer to fail together."""
BUDGET = 6
"""Retries that the budget allows of so many requests."""
INNOCENT, POISON = [5, 9], [7, 9]
"""A prompt, and one that ends the workers that compute it."""


class Gate:
    """Holds scripts back until all requests are placed."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    def __call__(self, script: Script) -> Script:
        return after(self.open, script)

    async def placed(self, cluster: FakeCluster, *workers: str) -> list["asyncio.Task[Completion]"]:
        """Begins all requests, and waits until they are placed on these workers."""
        running = [cluster.asking(INNOCENT) for _ in range(REQUESTS)]
        jobs = [cluster.workers[name].jobs for name in workers]
        await until(lambda: sum(map(len, jobs)) == REQUESTS, "all requests are placed")
        return running


async def drain(job: Job) -> None:
    """Sends some tokens, then returns the request as a worker that is about to stop."""
    for index in range(job.base, job.base + 3):
        job.send(index, (token_at(index),))
    job.fail(Failure.CODE_RETRY, "is draining", cause=Failure.CAUSE_DRAINING)


async def test_streams_of_a_draining_worker_move_outside_budget_and_attempts(serve: Serve) -> None:
    gate = Gate()
    stopping = fake("colocated-0", gate(drain))
    cluster = await serve(stopping, fake("colocated-1", gate(colocated_of())), max_attempts=1)
    running = await gate.placed(cluster, "colocated-0", "colocated-1")
    gate.open.set()
    timelines = [completion.timeline for completion in await asyncio.gather(*running)]
    assert sorted(line.migrations for line in timelines) == [0] * (REQUESTS // 2) + [1] * (REQUESTS // 2)
    assert not any(line.retries for line in timelines)
    assert sum(record.migrations for record in cluster.records) == len(stopping.jobs) == REQUESTS // 2
    # Its own word is enough: the membership still lists it as ready.
    await cluster.ready("colocated-1")


def refusing_handoffs(cause: Failure.Cause, bad: list[FakeWorker], named: bool = True) -> Script:
    """A prefill worker whose hand-offs to the workers in `bad` fail."""

    async def script(job: Job) -> None:
        ill = next((worker for worker in bad if worker.name == job.submit.peer.name), None)
        if ill is None:
            await prefill_of()(job)
            return
        blamed = [PeerRef(name=ill.name, incarnation=ill.incarnation)] if named else []
        job.fail(Failure.CODE_RETRY, "hand-off failed", cause=cause, blamed=blamed)

    return script


@pytest.mark.parametrize("cause", [Failure.CAUSE_LINK, Failure.CAUSE_PEER_LOST, Failure.CAUSE_REFUSED])
@pytest.mark.some(1)
async def test_a_broken_way_costs_no_error_and_is_learnt(serve: Serve, cause: Any) -> None:
    bad: list[FakeWorker] = []
    gate = Gate()

    async def decode(job: Job) -> None:
        if job.worker not in bad or job.submit.peer.name != "prefill-0":
            await decode_of()(job)

    broken = refusing_handoffs(cause, bad, named=cause != Failure.CAUSE_LINK)
    prefills = [fake("prefill-0", gate(broken)), fake("prefill-1", gate(prefill_of()))]
    decodes = [fake(f"decode-{index}", decode) for index in range(2)]
    cluster = await serve(*prefills, *decodes)
    bad.append(decodes[0])
    running = await gate.placed(cluster, "prefill-0", "prefill-1")
    gate.open.set()
    await asyncio.gather(*running)
    failed = sum(record.retries for record in cluster.records)
    assert failed > BUDGET
    avoided = {view.id.name: view.bad_peers for view in cluster.router.registry.view()}
    assert not any(view.avoided for view in cluster.router.registry.view()), "their other ways are good"
    assert not avoided["prefill-1"]
    for _ in range(10):
        await cluster.ask(INNOCENT)
    assert sum(record.retries for record in cluster.records) <= failed + 3, "only probes, after 1, 2 and 4 s"
    bad.clear()
    cluster.announce(prefill_1=MEMBER_STATE_SUSPECT)
    async with asyncio.timeout(20):
        while not any(job.submit.peer.name == "decode-0" for job in prefills[0].jobs[-2:]):
            await cluster.ask(INNOCENT)


@pytest.mark.more
async def test_a_silent_worker_is_ejected_and_comes_back_by_a_probe(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.router.placing.health.FIRST_SECONDS", 4.0)

    async def stall(job: Job) -> None:
        job.send(job.base, (token_at(job.base),))

    gate = Gate()
    ill, well = fake("colocated-0", gate(stall)), fake("colocated-1", gate(colocated_of()))
    cluster = await serve(ill, well, idle_timeout_seconds=1)
    running = await gate.placed(cluster, "colocated-0", "colocated-1")
    gate.open.set()
    await asyncio.gather(*running)
    stalled = len(ill.jobs)
    assert stalled > BUDGET
    for _ in range(6):
        await cluster.ask(INNOCENT)
    assert len(ill.jobs) == stalled, "avoided for FIRST_SECONDS"
    ill.script = colocated_of()
    async with asyncio.timeout(20):
        while len(ill.jobs) < stalled + 3:
            await cluster.ask(INNOCENT)
    # The last usable worker is never ejected.
    await well.stop()
    await cluster.ready("colocated-0")
    await cluster.ask(INNOCENT)


async def test_a_retry_that_a_suspect_causes_is_outside_the_budget(serve: Serve) -> None:
    """A peer that doesn't name the cause, as long as the membership suspects the other one.

    There are two prefill workers, since one gets no more than AHEAD_PROMPTS prompts at a time.
    """

    async def prefill(job: Job) -> None:
        if job.submit.peer.name == "decode-0":
            job.fail(Failure.CODE_RETRY, "hand-off closed: control stream to decode-0")
        else:
            await prefill_of()(job)

    gate = Gate()
    prefills = [fake(f"prefill-{index}", gate(prefill)) for index in range(2)]
    suspect = fake("decode-0", silent)
    cluster = await serve(*prefills, suspect, fake("decode-1"))
    running = await gate.placed(cluster, "prefill-0", "prefill-1")
    cluster.announce(decode_0=MEMBER_STATE_SUSPECT)
    await cluster.ready("prefill-0", "prefill-1", "decode-1")
    gate.open.set()
    done = await asyncio.gather(*running)
    assert sum(completion.timeline.retries for completion in done) == len(suspect.jobs) > BUDGET


async def test_a_cluster_without_a_working_way_still_ends_its_retries(serve: Serve) -> None:
    decode = fake("decode-0", silent)
    prefill = fake("prefill-0", refusing_handoffs(Failure.CAUSE_LINK, [decode]))
    cluster = await serve(prefill, decode)
    outcomes = await asyncio.gather(*(cluster.ask() for _ in range(REQUESTS)), return_exceptions=True)
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
    assert len(prefill.jobs) < 3 * REQUESTS


async def test_a_decode_worker_whose_loss_overtakes_the_first_token_counts(serve: Serve) -> None:
    """The decode worker has ended before the router reads from the prefill worker that it had the KV."""
    lost: set[str] = set()

    async def decode(job: Job) -> None:
        await job.worker.server.stop(None)
        lost.add(job.worker.name)

    async def late_prefill(job: Job) -> None:
        await until(lambda: job.submit.peer.name in lost, "its decode worker is lost")
        await asyncio.sleep(0.05)
        await prefill_of()(job)

    cluster = await serve(fake("prefill-0", late_prefill), *(fake(f"decode-{index}", decode) for index in range(4)))
    with pytest.raises(InternalError, match="suspected of ending workers"):
        await cluster.ask(POISON)
    assert len(lost) == 2
