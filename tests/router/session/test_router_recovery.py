"""Recovery of requests whose worker is lost, refuses them, breaks the contract or is silent."""

import asyncio
from typing import Any

import pytest

from kvrelay.client import DeadlineExceeded, Exhausted, InternalError, InvalidRequest, Unavailable
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD, MEMBER_STATE_DRAINING, MEMBER_STATE_SUSPECT
from kvrelay.internal.v1.worker_pb2 import WAIT_PREEMPTED, Failure, Load, RelayResponse
from kvrelay.router.placing.usual import RATE_SECONDS
from kvrelay.router.session import session
from support.router_fakes import (
    Job,
    Script,
    colocated_of,
    decode_of,
    failing,
    fake,
    first_attempt,
    prefill_of,
    silent,
    token_at,
    tokens,
    until,
    within,
)
from support.scenes import Serve

TOTAL = 10


def dying_decode(count: int) -> Script:
    """Sends tokens up to index `count` on the first attempt, then its worker is lost."""

    async def script(job: Job) -> None:
        for index in range(1, count):
            job.send(index, (token_at(index),))
        await job.shown(count)
        await job.worker.server.stop(None)

    return first_attempt(script)


@pytest.mark.parametrize("count", [1, 2, TOTAL - 1])
async def test_a_lost_decode_worker_leaves_no_gap(serve: Serve, count: int) -> None:
    cluster = await serve(
        fake("prefill-0"), fake("decode-0", dying_decode(count)), fake("decode-1", dying_decode(count))
    )
    assert (await cluster.ask()).timeline.retries == 1
    first, second = cluster.workers["prefill-0"].jobs
    assert second.submit.attempt == 2
    assert second.submit.prompt_tokens == len(first.submit.token_ids)
    assert second.submit.token_ids == [*first.submit.token_ids, *tokens(count)]
    assert second.submit.sampling == first.submit.sampling
    assert cluster.records[0].retries == 1


async def test_a_stream_goes_on_at_a_worker_of_its_own_degree(serve: Serve) -> None:
    """Although those of the other degree have less to do."""

    async def dying(job: Job) -> None:
        own = [worker for worker in decodes if worker.tensor_ranks == job.worker.tensor_ranks]
        for worker in own:
            worker.report_load(Load(requests={"running": 20}))
        registry = cluster.router.registry
        await until(lambda: sum(view.running >= 20 for view in registry.view()) == len(own), "the load is known")
        await dying_decode(4)(job)

    decodes = [fake(f"decode-{index}", first_attempt(dying), tensor_ranks=1 + index % 2) for index in range(4)]
    cluster = await serve(fake("prefill-0"), *decodes)
    assert (await cluster.ask()).timeline.retries == 1
    first, second = (worker for worker in decodes if worker.jobs)
    assert first.tensor_ranks == second.tensor_ranks


@pytest.mark.parametrize("state", [MEMBER_STATE_DEAD, None])
async def test_a_member_declared_dead_or_replaced_is_lost_at_once(serve: Serve, state: int | None) -> None:
    workers = (fake("prefill-0"), fake("decode-0", silent), fake("decode-1", silent))
    cluster = await serve(*workers)
    running = cluster.asking()
    await until(lambda: any(worker.jobs for worker in workers[1:]), "placed on decode")
    frozen, other = workers[1:] if workers[1].jobs else reversed(workers[1:])
    other.script = decode_of()
    members = [workers[0].member(), other.member(), frozen.member(MEMBER_STATE_DEAD)]
    if state is None:
        members[2] = frozen.member()
        members[2].incarnation = "another"
    cluster.supervisor.announce(*members)
    await asyncio.wait_for(running, 20)


@pytest.mark.parametrize("state", [MEMBER_STATE_DRAINING, MEMBER_STATE_SUSPECT])
async def test_a_draining_or_suspect_worker_finishes_what_it_has_and_gets_no_more(serve: Serve, state: Any) -> None:
    workers = (fake("colocated-0", silent), fake("colocated-1"))
    cluster = await serve(*workers)
    running = cluster.asking()
    job = await cluster.job("colocated-0")
    cluster.announce(colocated_0=state)
    await cluster.ready("colocated-1")
    for _ in range(3):
        await cluster.ask()
    assert len(workers[0].jobs) == 1
    await colocated_of()(job)
    await running


@pytest.mark.parametrize("case", ["silent", "silent and the only one", "slow"])
async def test_a_stream_leaves_a_suspect_that_sends_nothing(serve: Serve, case: str) -> None:
    async def first(job: Job) -> None:
        for index in range(1, TOTAL):
            if index == 3 and case != "slow":
                await asyncio.wait((asyncio.create_task(job.cancelled.wait()),), timeout=1.8)
            if job.cancelled.is_set():
                return
            job.send(index, (token_at(index),))
            await asyncio.sleep(0.2 if case == "slow" else 0.0)

    alone = case == "silent and the only one"
    others = () if alone else (fake("decode-1"),)
    cluster = await serve(fake("prefill-0"), fake("decode-0", first), *others)
    running = cluster.asking()
    await cluster.job("decode-0")
    cluster.announce(decode_0=MEMBER_STATE_SUSPECT)
    assert (await running).timeline.retries == (case == "silent")


async def test_another_incarnation_at_the_same_address_is_not_used(serve: Serve) -> None:
    worker = fake("colocated-0")
    cluster = await serve(worker, worker_wait_seconds=0.0)
    member = worker.member()
    member.incarnation = "stale"
    cluster.supervisor.announce(member)
    await until(lambda: not cluster.router.registry.complete, "the listed incarnation is not there")
    with pytest.raises(Unavailable):
        await cluster.ask()
    cluster.announce()
    await cluster.ready("colocated-0")
    await cluster.ask()


async def test_refusals_end_with_the_attempts_and_with_the_budget(serve: Serve) -> None:
    worker = fake("colocated-0", failing(Failure.CODE_RETRY, "the link is down"))
    cluster = await serve(worker, max_attempts=3)
    with pytest.raises(Unavailable, match=r"after 3 attempts.*the link is down") as caught:
        await cluster.ask()
    assert caught.value.given_up
    with pytest.raises(Unavailable, match="retry budget"):
        await cluster.ask()
    assert len(worker.jobs) == 5  # 3 attempts, then the one retry that was left
    assert cluster.outcomes == ["unavailable", "unavailable"]


async def test_a_full_cluster_gives_a_retry_delay(serve: Serve) -> None:
    workers = [fake(f"colocated-{index}", failing(Failure.CODE_FULL, "no free blocks")) for index in range(2)]
    cluster = await serve(*workers)
    with pytest.raises(Exhausted, match="no free blocks") as caught:
        await cluster.ask()
    assert caught.value.retry_after == RATE_SECONDS
    assert [len(worker.jobs) for worker in workers] == [1, 1]


@pytest.mark.parametrize(
    ("code", "error"), [(Failure.CODE_INVALID, InvalidRequest), (Failure.CODE_INTERNAL, InternalError)]
)
async def test_failures_on_every_worker_are_not_retried(
    serve: Serve, caplog: pytest.LogCaptureFixture, code: Failure.Code, error: type[Exception]
) -> None:
    """The text of an invalid request's error may quote its client, so no log has it."""
    cluster = await serve(fake("prefill-0", silent), fake("decode-0", failing(code, "just so")))
    with pytest.raises(error, match="just so"):
        await cluster.ask()
    await within(0.5, (await cluster.job("prefill-0")).cancelled, "it is cancelled")
    (line,) = [vars(record) for record in caplog.records if record.message == "attempt failed"]
    assert ("just so" in line["reason"]) == (code != Failure.CODE_INVALID)


@pytest.mark.parametrize(
    ("index", "sent"),
    [(3, (44,)), (0, (41,)), (1, tuple(range(TOTAL)))],
    ids=["hole", "another token for index 0", "more than max_tokens"],
)
async def test_a_worker_that_breaks_the_sequence_is_a_defect(serve: Serve, index: int, sent: tuple[int, ...]) -> None:
    async def decode(job: Job) -> None:
        await asyncio.sleep(0.02)
        job.send(index, sent)

    cluster = await serve(fake("prefill-0"), fake("decode-0", decode))
    with pytest.raises(InternalError, match=r"decode-0 .*attempt 1"):
        await cluster.ask()


async def test_a_stream_that_waits_on_a_worker_is_given_up_only_once_that_is_silent(serve: Serve) -> None:
    """A second and a third attempt would be needed if waiting counted as silence."""
    idle = 0.4

    async def preempted(job: Job) -> None:
        job.send(1, tokens(3)[1:])
        job.send(waits=WAIT_PREEMPTED)
        for steps in range(8):  # of other requests, whose tokens this router doesn't get
            await asyncio.sleep(idle / 2)
            job.stream.put_nowait(RelayResponse(load=Load(steps=steps)))
        job.send(3, (token_at(3),))

    cluster = await serve(fake("prefill-0"), fake("decode-0", first_attempt(preempted)), idle_timeout_seconds=idle)
    asking = cluster.asking()
    job = await cluster.job("decode-0")
    await job.shown(4)
    assert len(cluster.workers["decode-0"].jobs) == 1, "it has waited for four times as long"
    await asking  # from now on, the first attempt is silent
    assert cluster.records[-1].retries == 1


async def test_silence_has_limits(serve: Serve) -> None:
    async def stall(job: Job) -> None:
        job.send(1, tokens(3)[1:])

    workers = fake("prefill-0", silent), fake("decode-0", first_attempt(stall))
    cluster = await serve(*workers, first_token_timeout_seconds=0.3, idle_timeout_seconds=0.3)
    with pytest.raises(DeadlineExceeded, match="first_token_timeout_seconds"):
        await cluster.ask()
    with pytest.raises(DeadlineExceeded):
        await cluster.ask(timeout=0.1)
    for name in cluster.workers:
        for at in range(2):
            await within(0.5, (await cluster.job(name, at)).cancelled, "it is cancelled")
    workers[0].script = prefill_of()
    await cluster.ask()
    outcomes = cluster.outcomes
    # When the client's deadline passes, its own cancellation may reach the router before the router's timer.
    assert outcomes[0] == "deadline"
    assert outcomes[1] in ("deadline", "cancelled")
    assert outcomes[2:] == ["length"]
    assert cluster.records[-1].retries == 1


async def test_the_pause_before_an_attempt_ends_with_the_requests_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BACKOFF_SECONDS", "LONGEST_BACKOFF_SECONDS"):
        monkeypatch.setattr(session, name, 600.0)
    worker = fake("colocated-0", failing(Failure.CODE_RETRY))
    cluster = await serve(worker, first_token_timeout_seconds=0.8)
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(cluster.ask(timeout=100), 60)
