"""Recovery of requests whose worker is lost, refuses them, breaks the contract or is silent."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvrelay.client import AsyncClient, DeadlineExceeded, Exhausted, InternalError, InvalidRequest, Unavailable
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD, MEMBER_STATE_DRAINING, MEMBER_STATE_SUSPECT
from kvrelay.internal.v1.worker_pb2 import WAIT_PREEMPTED, Failure, Load, RelayResponse
from kvrelay.router.placing.usual import RATE_SECONDS
from support.router_fakes import (
    FakeWorker,
    Job,
    Script,
    colocated_of,
    decode_of,
    fake_cluster,
    pair,
    prefill_of,
    run,
    silent,
    until,
    within,
)

TOTAL = 10


def token_at(index: int) -> int:
    return 40 + index


def tokens(count: int) -> tuple[int, ...]:
    return tuple(token_at(index) for index in range(count))


def dying_decode(count: int) -> Script:
    """Sends tokens up to index `count` on the first attempt, then its worker is lost."""

    async def script(job: Job) -> None:
        if job.submit.attempt > 1:
            await decode_of(token_at)(job)
            return
        for index in range(1, count):
            job.send(index, (token_at(index),))
        await job.shown(count)
        await job.worker.server.stop(None)

    return script


async def complete(client: AsyncClient, **options: Any) -> tuple[int, ...]:
    completion = await client.complete("hello", **{"max_tokens": TOTAL, "timeout": 20, **options})
    return completion.token_ids


@pytest.mark.parametrize("count", [1, 2, TOTAL - 1])
def test_a_lost_decode_worker_leaves_no_gap(tmp_path: Path, count: int) -> None:
    async def test() -> None:
        workers = (
            FakeWorker("prefill-0", "prefill", prefill_of(token_at)),
            FakeWorker("decode-0", "decode", dying_decode(count)),
            FakeWorker("decode-1", "decode", dying_decode(count)),
        )
        async with fake_cluster(tmp_path, *workers) as cluster, AsyncClient(cluster.router.address) as client:
            completion = await client.complete("hello", max_tokens=TOTAL, timeout=20)
            assert completion.token_ids == tokens(TOTAL)
            assert completion.timeline.retries == 1
            first, second = cluster.workers["prefill-0"].jobs
            assert second.submit.attempt == 2
            assert second.submit.prompt_tokens == len(first.submit.token_ids)
            assert second.submit.token_ids == [*first.submit.token_ids, *tokens(count)]
            assert second.submit.sampling == first.submit.sampling
            assert cluster.records[0].retries == 1

    run(test)


def test_a_request_continues_on_the_lost_workers_replacement(tmp_path: Path) -> None:
    async def test() -> None:
        first = FakeWorker("decode-0", "decode", dying_decode(4))
        prefill = FakeWorker("prefill-0", "prefill", prefill_of(token_at))
        async with fake_cluster(tmp_path, prefill, first) as cluster, AsyncClient(cluster.router.address) as client:
            running = asyncio.create_task(complete(client))
            await until(lambda: cluster.router.registry.complete, "serving")
            await until(lambda: not cluster.router.registry.complete, "decode lost")
            second = FakeWorker("decode-0", "decode", decode_of(token_at))
            await second.start()
            cluster.supervisor.announce(prefill.member(), second.member())
            assert await running == tokens(TOTAL)
            await second.stop()

    run(test)


def test_the_loss_of_prefill_after_the_handoff_changes_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        prefill, decode = pair(token_at, pause=0.05)
        async with fake_cluster(tmp_path, prefill, decode) as cluster, AsyncClient(cluster.router.address) as client:
            stream = client.generate("hello", max_tokens=TOTAL, timeout=20)
            chunks = [await anext(stream), await anext(stream)]
            await prefill.stop()
            chunks += [chunk async for chunk in stream]
            assert tuple(token for chunk in chunks for token in chunk.token_ids) == tokens(TOTAL)
            assert chunks[-1].timeline is not None
            assert chunks[-1].timeline.retries == 0

    run(test)


@pytest.mark.parametrize("sent", [False, True])
def test_prefill_lost_before_the_handoff_is_another_attempt(tmp_path: Path, sent: bool) -> None:
    async def dying_prefill(job: Job) -> None:
        if job.submit.attempt > 1:
            await prefill_of(token_at)(job)
            return
        if sent:
            job.send(0, tokens(1))
            await job.shown(1)
        await job.worker.server.stop(None)

    async def decode(job: Job) -> None:
        if job.submit.attempt > 1:
            await decode_of(token_at)(job)

    async def test() -> None:
        workers = (
            FakeWorker("prefill-0", "prefill", dying_prefill),
            FakeWorker("prefill-1", "prefill", dying_prefill),
            FakeWorker("decode-0", "decode", decode),
        )
        async with fake_cluster(tmp_path, *workers) as cluster, AsyncClient(cluster.router.address) as client:
            assert await complete(client) == tokens(TOTAL)
            assert (await cluster.job("decode-0")).cancelled.is_set()
            assert cluster.records[0].retries == 1

    run(test)


@pytest.mark.parametrize("state", [MEMBER_STATE_DEAD, None])
def test_a_member_declared_dead_or_replaced_is_lost_at_once(tmp_path: Path, state: int | None) -> None:
    async def test() -> None:
        workers = (
            FakeWorker("prefill-0", "prefill", prefill_of(token_at)),
            FakeWorker("decode-0", "decode", silent),
            FakeWorker("decode-1", "decode", silent),
        )
        async with fake_cluster(tmp_path, *workers) as cluster, AsyncClient(cluster.router.address) as client:
            running = asyncio.create_task(complete(client))
            await until(lambda: any(worker.jobs for worker in workers[1:]), "placed on decode")
            frozen, other = workers[1:] if workers[1].jobs else reversed(workers[1:])
            other.script = decode_of(token_at)
            members = [workers[0].member(), other.member(), frozen.member(MEMBER_STATE_DEAD)]
            if state is None:
                members[2] = frozen.member()
                members[2].incarnation = "another"
            cluster.supervisor.announce(*members)
            assert await asyncio.wait_for(running, 2) == tokens(TOTAL)

    run(test)


@pytest.mark.parametrize("state", [MEMBER_STATE_DRAINING, MEMBER_STATE_SUSPECT])
def test_a_draining_or_suspect_worker_finishes_what_it_has_and_gets_no_more(tmp_path: Path, state: Any) -> None:
    async def test() -> None:
        workers = (
            FakeWorker("colocated-0", "colocated", silent),
            FakeWorker("colocated-1", "colocated", colocated_of(token_at)),
        )
        async with fake_cluster(tmp_path, *workers) as cluster, AsyncClient(cluster.router.address) as client:
            running = asyncio.create_task(complete(client))
            job = await cluster.job("colocated-0")
            cluster.announce(colocated_0=state)
            await cluster.ready("colocated-1")
            for _ in range(3):
                assert await complete(client) == tokens(TOTAL)
            assert len(workers[0].jobs) == 1
            await colocated_of(token_at)(job)
            assert await running == tokens(TOTAL)

    run(test)


@pytest.mark.parametrize("case", ["silent", "silent and the only one", "slow"])
def test_a_stream_leaves_a_suspect_that_sends_nothing(tmp_path: Path, case: str) -> None:
    async def first(job: Job) -> None:
        for index in range(1, TOTAL):
            if index == 3 and case != "slow":
                await asyncio.wait((asyncio.create_task(job.cancelled.wait()),), timeout=1.8)
            if job.cancelled.is_set():
                return
            job.send(index, (token_at(index),))
            await asyncio.sleep(0.2 if case == "slow" else 0.0)

    async def test() -> None:
        alone = case == "silent and the only one"
        others = () if alone else (FakeWorker("decode-1", "decode", decode_of(token_at)),)
        workers = FakeWorker("prefill-0", "prefill", prefill_of(token_at)), FakeWorker("decode-0", "decode", first)
        async with (
            fake_cluster(tmp_path, *workers, *others) as cluster,
            AsyncClient(cluster.router.address, timeout=20) as client,
        ):
            running = asyncio.create_task(client.complete("hello", max_tokens=TOTAL))
            await cluster.job("decode-0")
            cluster.announce(decode_0=MEMBER_STATE_SUSPECT)
            completion = await running
            assert completion.token_ids == tokens(TOTAL)
            assert completion.timeline.retries == (case == "silent")

    run(test)


def test_a_supervisor_that_goes_away_stops_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with fake_cluster(tmp_path, *pair(token_at)) as cluster, AsyncClient(cluster.router.address) as client:
            port = cluster.supervisor.port
            await cluster.supervisor.stop()
            assert await complete(client) == tokens(TOTAL)
            # A new supervisor that has no members yet changes nothing either.
            cluster.supervisor.members = []
            cluster.supervisor.heard.clear()
            await cluster.supervisor.start(port)
            await until(lambda: "router-0" in cluster.supervisor.heard, "the router sends heartbeats again")
            assert await complete(client) == tokens(TOTAL)

    run(test)


def test_another_incarnation_at_the_same_address_is_not_used(tmp_path: Path) -> None:
    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", colocated_of(token_at))
        async with (
            fake_cluster(tmp_path, worker, worker_wait_seconds=0.0) as cluster,
            AsyncClient(cluster.router.address) as client,
        ):
            member = worker.member()
            member.incarnation = "stale"
            cluster.supervisor.announce(member)
            await until(lambda: not cluster.router.registry.complete, "the listed incarnation is not there")
            with pytest.raises(Unavailable):
                await complete(client)
            cluster.announce()
            await cluster.ready("colocated-0")
            assert await complete(client) == tokens(TOTAL)

    run(test)


def test_a_refused_request_goes_elsewhere(tmp_path: Path) -> None:
    async def refuse(job: Job) -> None:
        job.fail(Failure.CODE_RETRY)

    async def test() -> None:
        workers = (
            FakeWorker("colocated-0", "colocated", refuse),
            FakeWorker("colocated-1", "colocated", colocated_of(token_at)),
        )
        async with fake_cluster(tmp_path, *workers) as cluster, AsyncClient(cluster.router.address) as client:
            assert await complete(client) == tokens(TOTAL)
            assert len(workers[0].jobs) == 1

    run(test)


def test_refusals_end_with_the_attempts_and_with_the_budget(tmp_path: Path) -> None:
    async def refuse(job: Job) -> None:
        job.fail(Failure.CODE_RETRY, "the link is down")

    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", refuse)
        async with fake_cluster(tmp_path, worker, max_attempts=3) as cluster:
            async with AsyncClient(cluster.router.address) as client:
                with pytest.raises(Unavailable, match=r"after 3 attempts.*the link is down"):
                    await complete(client)
                with pytest.raises(Unavailable, match="retry budget"):
                    await complete(client)
            assert len(worker.jobs) == 5  # 3 attempts, then the one retry that was left
            assert [record.outcome for record in cluster.records] == ["unavailable", "unavailable"]

    run(test)


def test_a_full_cluster_gives_a_retry_delay(tmp_path: Path) -> None:
    async def full(job: Job) -> None:
        job.fail(Failure.CODE_FULL, "no free blocks")

    async def test() -> None:
        workers = [FakeWorker(f"colocated-{index}", "colocated", full) for index in range(2)]
        async with fake_cluster(tmp_path, *workers) as cluster, AsyncClient(cluster.router.address) as client:
            with pytest.raises(Exhausted, match="no free blocks") as caught:
                await complete(client)
            assert caught.value.retry_after == RATE_SECONDS
            assert [len(worker.jobs) for worker in workers] == [1, 1]

    run(test)


@pytest.mark.parametrize(
    ("code", "error"), [(Failure.CODE_INVALID, InvalidRequest), (Failure.CODE_INTERNAL, InternalError)]
)
def test_failures_on_every_worker_are_not_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: Failure.Code, error: type[Exception]
) -> None:
    """The text of an invalid request's error may quote its client, so no log has it."""

    async def fail(job: Job) -> None:
        job.fail(code, "just so")

    async def test() -> None:
        workers = FakeWorker("prefill-0", "prefill", silent), FakeWorker("decode-0", "decode", fail)
        async with fake_cluster(tmp_path, *workers) as cluster, AsyncClient(cluster.router.address) as client:
            with pytest.raises(error, match="just so"):
                await complete(client)
            await within(0.5, (await cluster.job("prefill-0")).cancelled, "it is cancelled")

    run(test)
    (line,) = [vars(record) for record in caplog.records if record.message == "attempt failed"]
    assert ("just so" in line["reason"]) == (code != Failure.CODE_INVALID)


@pytest.mark.parametrize(
    ("index", "sent"),
    [(3, (44,)), (0, (41,)), (1, tuple(range(TOTAL)))],
    ids=["hole", "another token for index 0", "more than max_tokens"],
)
def test_a_worker_that_breaks_the_sequence_is_a_defect(tmp_path: Path, index: int, sent: tuple[int, ...]) -> None:
    async def decode(job: Job) -> None:
        await asyncio.sleep(0.02)
        job.send(index, sent)

    async def test() -> None:
        workers = FakeWorker("prefill-0", "prefill", prefill_of(token_at)), FakeWorker("decode-0", "decode", decode)
        async with fake_cluster(tmp_path, *workers) as cluster, AsyncClient(cluster.router.address) as client:
            with pytest.raises(InternalError, match=r"decode-0 .*attempt 1"):
                await complete(client)

    run(test)


def test_a_stream_that_waits_on_a_worker_is_given_up_only_once_that_is_silent(tmp_path: Path) -> None:
    """A second and a third attempt would be needed if waiting counted as silence."""
    idle = 0.4

    async def preempted(job: Job) -> None:
        if job.submit.attempt > 1:
            await decode_of(token_at)(job)
            return
        job.send(1, tokens(3)[1:])
        job.send(waits=WAIT_PREEMPTED)
        for steps in range(8):  # of other requests, whose tokens this router doesn't get
            await asyncio.sleep(idle / 2)
            job.stream.put_nowait(RelayResponse(load=Load(steps=steps)))
        job.send(3, (token_at(3),))

    async def test() -> None:
        workers = FakeWorker("prefill-0", "prefill", prefill_of(token_at)), FakeWorker("decode-0", "decode", preempted)
        async with (
            fake_cluster(tmp_path, *workers, idle_timeout_seconds=idle) as cluster,
            AsyncClient(cluster.router.address) as client,
        ):
            asking = asyncio.create_task(complete(client))
            job = await cluster.job("decode-0")
            await job.shown(4)
            assert len(cluster.workers["decode-0"].jobs) == 1, "it has waited for four times as long"
            assert await asking == tokens(TOTAL), "from now on, the first attempt is silent"
            assert cluster.records[-1].retries == 1

    run(test)


def test_silence_has_limits(tmp_path: Path) -> None:
    async def stall(job: Job) -> None:
        if job.submit.attempt == 1:
            job.send(1, tokens(3)[1:])
        else:
            await decode_of(token_at)(job)

    async def test() -> None:
        workers = FakeWorker("prefill-0", "prefill", silent), FakeWorker("decode-0", "decode", stall)
        limits = {"first_token_timeout_seconds": 0.3, "idle_timeout_seconds": 0.3}
        async with fake_cluster(tmp_path, *workers, **limits) as cluster, AsyncClient(cluster.router.address) as client:
            with pytest.raises(DeadlineExceeded, match="first_token_timeout_seconds"):
                await complete(client)
            with pytest.raises(DeadlineExceeded):
                await complete(client, timeout=0.1)
            for name in cluster.workers:
                for at in range(2):
                    await within(0.5, (await cluster.job(name, at)).cancelled, "it is cancelled")
            workers[0].script = prefill_of(token_at)
            assert await complete(client) == tokens(TOTAL)
            outcomes = [record.outcome for record in cluster.records]
            # When the client's deadline passes, its own cancellation may reach the router before the router's timer.
            assert outcomes[0] == "deadline"
            assert outcomes[1] in ("deadline", "cancelled")
            assert outcomes[2:] == ["length"]
            assert cluster.records[-1].retries == 1

    run(test)
