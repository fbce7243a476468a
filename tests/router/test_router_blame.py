"""Blame for a failed attempt: a request pays for its own fault only, never for a worker that is lost, stops or is
ill."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvrelay.client import AsyncClient, InternalError, Unavailable
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_SUSPECT
from kvrelay.internal.v1.worker_pb2 import Failure, PeerRef
from support.router_fakes import (
    FakeCluster,
    FakeWorker,
    Job,
    Script,
    colocated_of,
    decode_of,
    fake_cluster,
    prefill_of,
    run,
    silent,
    until,
)

TOTAL = 10
REQUESTS = 30
"""Requests that run at once; the retry budget allows fewer to fail together."""
POISON = 7
"""First token of the prompt that ends workers."""
SECRET = "the text of a client"


def token_at(index: int) -> int:
    return 40 + index


async def ask(client: AsyncClient, first: int = 5, **options: Any) -> Any:
    completion = await client.complete([first, 9], **{"max_tokens": TOTAL, "timeout": 30, **options})
    assert completion.token_ids == tuple(token_at(index) for index in range(TOTAL))
    return completion


def peer(worker: FakeWorker) -> PeerRef:
    return PeerRef(name=worker.name, incarnation=worker.incarnation)


def after(gate: asyncio.Event, script: Script) -> Script:
    """Begins when the gate opens, so that all requests are placed before the first one ends."""

    async def gated(job: Job) -> None:
        await gate.wait()
        await script(job)

    return gated


async def placed(cluster: FakeCluster, *workers: str) -> None:
    """Waits until all requests are placed on these workers."""
    await until(
        lambda: sum(len(cluster.workers[name].jobs) for name in workers) == REQUESTS, "all requests are placed", 20
    )


async def drain(job: Job) -> None:
    """Sends some tokens, then returns the request as a worker that is about to stop."""
    for index in range(job.base, job.base + 3):
        job.send(index, (token_at(index),))
    job.fail(Failure.CODE_RETRY, "is draining", cause=Failure.CAUSE_DRAINING)


def test_streams_of_a_draining_worker_move_outside_budget_and_attempts(tmp_path: Path) -> None:
    async def test() -> None:
        gate = asyncio.Event()
        stopping = FakeWorker("colocated-0", "colocated", after(gate, drain))
        other = FakeWorker("colocated-1", "colocated", after(gate, colocated_of(token_at)))
        async with (
            fake_cluster(tmp_path, stopping, other, max_attempts=1) as cluster,
            AsyncClient(cluster.router.address) as client,
        ):
            running = [asyncio.create_task(ask(client)) for _ in range(REQUESTS)]
            await placed(cluster, "colocated-0", "colocated-1")
            gate.set()
            done = await asyncio.gather(*running)
            moved = [completion for completion in done if completion.timeline.migrations]
            assert len(moved) == len(stopping.jobs) == REQUESTS // 2
            assert all(completion.timeline.migrations == 1 for completion in moved)
            assert not any(completion.timeline.retries for completion in done)
            assert sum(record.migrations for record in cluster.records) == len(moved)
            # Its own word is enough: the membership still lists it as ready.
            await cluster.ready("colocated-1")

    run(test)


def refusing_handoffs(cause: Failure.Cause, bad: list[FakeWorker], named: bool = True) -> Script:
    """A prefill worker whose hand-offs to the workers in `bad` fail."""

    async def script(job: Job) -> None:
        ill = next((worker for worker in bad if worker.name == job.submit.peer.name), None)
        if ill is None:
            await prefill_of(token_at)(job)
            return
        job.fail(Failure.CODE_RETRY, "hand-off failed", cause=cause, blamed=[peer(ill)] if named else [])

    return script


def decode_unless(bad: list[FakeWorker], prefills: set[str]) -> Script:
    async def script(job: Job) -> None:
        if job.worker not in bad or job.submit.peer.name not in prefills:
            await decode_of(token_at)(job)

    return script


@pytest.mark.parametrize("cause", [Failure.CAUSE_LINK, Failure.CAUSE_PEER_LOST, Failure.CAUSE_REFUSED])
def test_a_broken_way_costs_no_error_and_is_learnt(tmp_path: Path, cause: Any) -> None:
    async def test() -> None:
        bad: list[FakeWorker] = []
        gate = asyncio.Event()
        broken = refusing_handoffs(cause, bad, named=cause != Failure.CAUSE_LINK)
        prefills = [
            FakeWorker("prefill-0", "prefill", after(gate, broken)),
            FakeWorker("prefill-1", "prefill", after(gate, prefill_of(token_at))),
        ]
        decodes = [FakeWorker(f"decode-{index}", "decode", decode_unless(bad, {"prefill-0"})) for index in range(2)]
        async with (
            fake_cluster(tmp_path, *prefills, *decodes) as cluster,
            AsyncClient(cluster.router.address) as client,
        ):
            bad.append(decodes[0])
            running = [asyncio.create_task(ask(client)) for _ in range(REQUESTS)]
            await placed(cluster, "prefill-0", "prefill-1")
            gate.set()
            await asyncio.gather(*running)
            failed = sum(record.retries for record in cluster.records)
            assert failed > 6, "more than the budget of these requests"
            avoided = {view.id.name: view.bad_peers for view in cluster.router.registry.view()}
            assert not any(view.avoided for view in cluster.router.registry.view()), "their other ways are good"
            assert not avoided["prefill-1"]
            for _ in range(10):
                await ask(client)
            assert sum(record.retries for record in cluster.records) <= failed + 3, "only probes, after 1, 2 and 4 s"
            bad.clear()
            cluster.announce(prefill_1=MEMBER_STATE_SUSPECT)

            async def restored() -> None:
                while not any(job.submit.peer.name == "decode-0" for job in prefills[0].jobs[-2:]):
                    await ask(client)

            await asyncio.wait_for(restored(), 20)

    run(test)


def test_a_silent_worker_is_ejected_and_comes_back_by_a_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.router.placing.health.FIRST_SECONDS", 4.0)

    async def stall(job: Job) -> None:
        job.send(job.base, (token_at(job.base),))

    async def test() -> None:
        gate = asyncio.Event()
        ill = FakeWorker("colocated-0", "colocated", after(gate, stall))
        well = FakeWorker("colocated-1", "colocated", after(gate, colocated_of(token_at)))
        async with (
            fake_cluster(tmp_path, ill, well, idle_timeout_seconds=1) as cluster,
            AsyncClient(cluster.router.address) as client,
        ):
            running = [asyncio.create_task(ask(client)) for _ in range(REQUESTS)]
            await placed(cluster, "colocated-0", "colocated-1")
            gate.set()
            await asyncio.gather(*running)
            stalled = len(ill.jobs)
            assert stalled > 6, "more than the budget of these requests"
            for _ in range(6):
                await ask(client)
            assert len(ill.jobs) == stalled, "avoided for FIRST_SECONDS"
            ill.script = colocated_of(token_at)

            async def restored() -> None:
                while len(ill.jobs) < stalled + 3:
                    await ask(client)

            await asyncio.wait_for(restored(), 20)
            # The last usable worker is never ejected.
            await well.stop()
            await cluster.ready("colocated-0")
            await ask(client)

    run(test)


def test_a_retry_that_a_suspect_causes_is_outside_the_budget(tmp_path: Path) -> None:
    """A peer that doesn't name the cause, as long as the membership suspects the other one."""

    async def prefill(job: Job) -> None:
        if job.submit.peer.name == "decode-0":
            job.fail(Failure.CODE_RETRY, "hand-off closed: control stream to decode-0")
        else:
            await prefill_of(token_at)(job)

    async def test() -> None:
        gate = asyncio.Event()
        workers = (
            FakeWorker("prefill-0", "prefill", after(gate, prefill)),
            FakeWorker("decode-0", "decode", silent),
            FakeWorker("decode-1", "decode", decode_of(token_at)),
        )
        async with fake_cluster(tmp_path, *workers) as cluster, AsyncClient(cluster.router.address) as client:
            running = [asyncio.create_task(ask(client)) for _ in range(REQUESTS)]
            await placed(cluster, "prefill-0")
            cluster.announce(decode_0=MEMBER_STATE_SUSPECT)
            await cluster.ready("prefill-0", "decode-1")
            gate.set()
            done = await asyncio.gather(*running)
            refused = len(workers[1].jobs)
            assert sum(completion.timeline.retries for completion in done) == refused > 6

    run(test)


def test_a_cluster_without_a_working_way_still_ends_its_retries(tmp_path: Path) -> None:
    async def test() -> None:
        decode = FakeWorker("decode-0", "decode", silent)
        prefill = FakeWorker("prefill-0", "prefill", refusing_handoffs(Failure.CAUSE_LINK, [decode]))
        async with fake_cluster(tmp_path, prefill, decode) as cluster, AsyncClient(cluster.router.address) as client:
            outcomes = await asyncio.gather(*(ask(client) for _ in range(REQUESTS)), return_exceptions=True)
            assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
            assert len(prefill.jobs) < 3 * REQUESTS

    run(test)


def dying(script: Script, tokens: int = 0) -> Script:
    """Ends its worker's process, as far as the router can tell, when it has computed some of the poison."""

    async def run_job(job: Job) -> None:
        if job.submit.token_ids[0] != POISON:
            await script(job)
            return
        for index in range(job.base, job.base + tokens):
            job.send(index, (token_at(index),))
        await asyncio.sleep(0.1)
        await job.worker.server.stop(None)

    return run_job


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_request_that_ends_two_workers_fails_and_takes_no_other_along(
    tmp_path: Path, tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def slow(job: Job) -> None:
        for index in range(job.base, TOTAL):
            await asyncio.sleep(0.05)
            last = index == TOTAL - 1
            job.send(index, (token_at(index),), 2 if last else 0)  # type: ignore[arg-type]  # LENGTH

    async def test() -> None:
        workers = [FakeWorker(f"colocated-{index}", "colocated", dying(slow, tokens)) for index in range(4)]
        async with fake_cluster(tmp_path, *workers) as cluster, AsyncClient(cluster.router.address) as client:
            innocents = [asyncio.create_task(ask(client)) for _ in range(12)]
            await cluster.job("colocated-3", 2)
            with pytest.raises(InternalError, match="suspected of ending workers"):
                await ask(client, POISON, choice=[SECRET, "other"], logit_bias={77: 1.5}, top_k=12)
            done = await asyncio.gather(*innocents)
            assert any(completion.timeline.retries for completion in done)
            later = await asyncio.gather(*(ask(client) for _ in range(4)))
            assert not any(completion.timeline.retries for completion in later)
            poisoned = [job for worker in workers for job in worker.jobs if job.submit.token_ids[0] == POISON]
            assert len(poisoned) == 2, "two workers are lost, not more"
            assert len({view.id for view in cluster.router.registry.view() if view.ready}) == 2
            assert all(view.suspects == view.requests == 0 for view in cluster.router.registry.view())

    run(test)
    (line,) = [record for record in caplog.records if record.message == "request suspected of ending workers"]
    assert line.prompt_tokens == 2  # type: ignore[attr-defined]  # an extra field
    assert line.sampling["max_tokens"] == TOTAL  # type: ignore[attr-defined]  # an extra field
    assert line.sampling["top_k"] == 12  # type: ignore[attr-defined]  # an extra field
    assert not any(SECRET in str(record.__dict__) for record in caplog.records)


def test_a_decode_worker_whose_loss_overtakes_the_first_token_counts(tmp_path: Path) -> None:
    """The decode worker has ended before the router reads from the prefill worker that it had the KV."""
    lost: set[str] = set()

    async def dying_decode(job: Job) -> None:
        await job.worker.server.stop(None)
        lost.add(job.worker.name)

    async def late_prefill(job: Job) -> None:
        await until(lambda: job.submit.peer.name in lost, "its decode worker is lost")
        await asyncio.sleep(0.05)
        await prefill_of(token_at)(job)

    async def test() -> None:
        decodes = [FakeWorker(f"decode-{index}", "decode", dying_decode) for index in range(4)]
        async with (
            fake_cluster(tmp_path, FakeWorker("prefill-0", "prefill", late_prefill), *decodes) as cluster,
            AsyncClient(cluster.router.address) as client,
        ):
            with pytest.raises(InternalError, match="suspected of ending workers"):
                await ask(client, POISON)
            assert len(lost) == 2

    run(test)


def test_workers_of_another_digest_are_never_paired(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        workers = (
            FakeWorker("prefill-0", "prefill", prefill_of(token_at), compatibility="new"),
            FakeWorker("decode-0", "decode", decode_of(token_at), compatibility="new"),
            FakeWorker("decode-1", "decode", silent, compatibility="old"),
        )
        async with fake_cluster(tmp_path, *workers) as cluster, AsyncClient(cluster.router.address) as client:
            for _ in range(8):
                await ask(client)
            assert not workers[2].jobs
            cluster.announce()
            await ask(client)

    run(test)
    lines = [record for record in caplog.records if record.message == "workers not paired"]
    assert len(lines) == 1, "once per change"
    assert "decode-1 (digest old) can't be paired with" in lines[0].reason  # type: ignore[attr-defined]  # an extra field


def test_a_worker_of_another_model_that_is_reached_first_doesnt_decide(tmp_path: Path) -> None:
    async def test() -> None:
        odd = FakeWorker("prefill-9", "prefill", silent, fingerprint="0" * 64)
        prefill = FakeWorker("prefill-0", "prefill", prefill_of(token_at))
        decode = FakeWorker("decode-0", "decode", decode_of(token_at))
        async with fake_cluster(tmp_path, odd) as cluster, AsyncClient(cluster.router.address) as client:
            for worker in (prefill, decode):
                await worker.start()
            cluster.supervisor.announce(odd.member(), prefill.member(), decode.member())
            await cluster.ready("prefill-0", "decode-0")
            await ask(client)
            for worker in (prefill, decode):
                await worker.stop()

    run(test)
