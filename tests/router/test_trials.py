"""Suspects are tried alone, and only a trial that has begun convicts: no innocent request fails with another one."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvrelay.client import AsyncClient, InternalError, Unavailable
from kvrelay.internal.v1.worker_pb2 import Failure, PeerRef
from kvrelay.router.session import suspects
from kvrelay.router.session.suspects import Suspicion
from support.router_fakes import (
    FakeWorker,
    Job,
    Script,
    colocated_of,
    decode_of,
    fake_cluster,
    length_if,
    prefill_of,
    run,
    second_router,
    silent,
    until,
)

TOTAL = 10
POISON = 7
"""First token of the prompt that ends workers."""


def token_at(index: int) -> int:
    return 40 + index


async def ask(client: AsyncClient, first: int = 5, **options: Any) -> Any:
    completion = await client.complete([first, 9], **{"max_tokens": TOTAL, "timeout": 30, **options})
    assert completion.token_ids == tuple(token_at(index) for index in range(TOTAL))
    return completion


def asking(client: AsyncClient, first: int = 5) -> "asyncio.Task[Any]":
    return asyncio.create_task(ask(client, first), name="client")


def refuse(job: Job) -> None:
    """Refuses a suspect, as a worker does that has another one."""
    job.fail(Failure.CODE_RETRY, cause=Failure.CAUSE_TRIAL)


def colocated(*scripts: Script, **options: Any) -> list[FakeWorker]:
    return [FakeWorker(f"colocated-{at}", "colocated", script, **options) for at, script in enumerate(scripts)]


async def at_work(*workers: FakeWorker) -> tuple[FakeWorker, Job]:
    """The first of these workers that gets a part, and the part."""
    found = await until(lambda: [worker for worker in workers if worker.jobs], "one has a part")
    return found[0], found[0].jobs[0]


def test_a_worker_that_is_lost_before_a_trial_begins_convicts_nobody(tmp_path: Path) -> None:
    """The worker may have been lost in another router's trial, and its refusal with it."""

    async def test() -> None:
        workers = colocated(*[silent] * 4, suspected=lambda job: None)
        async with fake_cluster(tmp_path, *workers) as cluster, AsyncClient(cluster.router.address) as client:
            asked = asking(client)
            for tries in range(2):
                worker, job = await at_work(*workers)
                assert (job.submit.suspect_tokens > 0) == job.submit.on_trial == (tries > 0)
                workers.remove(worker)
                if tries == 1:
                    for left in workers:
                        left.suspected, left.script = Job.take, colocated_of(token_at)
                await worker.stop()
            assert (await asked).timeline.retries == 2

    run(test)


def test_a_worker_that_lives_after_its_stream_was_lost_convicts_nobody(tmp_path: Path) -> None:
    async def test() -> None:
        workers = colocated(*[silent] * 3)
        async with fake_cluster(tmp_path, *workers) as cluster, AsyncClient(cluster.router.address) as client:
            asked = asking(client)
            for tries in range(2):
                worker, job = await at_work(*workers)
                await job.begun.wait()
                workers.remove(worker)
                for left in workers if tries else ():
                    left.script = colocated_of(token_at)
                if tries:
                    worker.cut()
                else:
                    await worker.stop()
            assert (await asked).timeline.retries == 2
            assert workers[0].jobs[0].submit.on_trial, "it is a suspect still"

    run(test)


@pytest.mark.parametrize("refused", ["prefill", "decode"])
def test_a_trial_begins_when_each_worker_has_taken_the_suspect(tmp_path: Path, refused: str) -> None:
    async def test() -> None:
        lost = FakeWorker("prefill-0", "prefill", silent)
        prefill = FakeWorker("prefill-1", "prefill", prefill_of(token_at))
        decode = FakeWorker("decode-0", "decode", decode_of(token_at))
        once, other = (prefill, decode) if refused == "prefill" else (decode, prefill)

        def refuse_one(job: Job) -> None:
            if len([job for job in once.jobs if job.submit.suspect_tokens]) == 1:
                refuse(job)
            else:
                job.take()

        once.suspected = refuse_one
        async with fake_cluster(tmp_path, lost, decode) as cluster, AsyncClient(cluster.router.address) as client:
            asked = asking(client)
            await cluster.job("prefill-0")
            await prefill.start()
            cluster.workers["prefill-1"], prefill.router = prefill, cluster.router
            cluster.announce()
            await cluster.ready("prefill-0", "prefill-1", "decode-0")
            await lost.stop()
            assert (await asked).timeline.retries == 1, "waiting for a trial is none"
            suspects = [job for job in other.jobs if job.submit.suspect_tokens]
            assert [job.begun.is_set() for job in suspects] == [False, True]
            await until(lambda: all(view.suspects == 0 for view in cluster.router.registry.view()), "none is left")
            await prefill.stop()

    run(test)


def test_one_that_gets_no_trial_runs_beside_others_and_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspects, "TRIAL_SECONDS", 0.3)

    async def test() -> None:
        def busy(job: Job) -> None:
            if job.submit.on_trial:
                refuse(job)
            else:
                job.take()

        workers = colocated(silent, silent, suspected=busy)
        async with fake_cluster(tmp_path, *workers) as cluster, AsyncClient(cluster.router.address) as client:
            asked = asking(client)
            lost, _ = await at_work(*workers)
            (other,) = set(cluster.workers.values()) - {lost}
            other.script = colocated_of(token_at)
            await lost.stop()
            assert (await asked).timeline.retries == 1
            first, last = other.jobs[0].submit, other.jobs[-1].submit
            assert (first.on_trial, last.on_trial) == (True, False)
            assert first.suspect_tokens == last.suspect_tokens > 0

    run(test)


def test_one_that_is_refused_all_the_time_is_given_up(tmp_path: Path) -> None:
    async def test() -> None:
        workers = colocated(silent, silent, suspected=refuse)
        async with (
            fake_cluster(tmp_path, *workers, idle_timeout_seconds=1.0) as cluster,
            AsyncClient(cluster.router.address) as client,
        ):
            asked = asking(client)
            await (await at_work(*workers))[0].stop()
            with pytest.raises(Unavailable, match="other suspects are tried all the time"):
                await asked

    run(test)


def test_a_loss_counts_that_the_other_worker_reports_first(tmp_path: Path) -> None:
    """The trial ends when the router itself loses the worker; the other worker's report alone doesn't end it."""

    async def test() -> None:
        prefills = [FakeWorker(f"prefill-{at}", "prefill", silent) for at in range(3)]
        decode = FakeWorker("decode-0", "decode", silent)
        everyone = (*prefills, decode)
        async with fake_cluster(tmp_path, *everyone) as cluster, AsyncClient(cluster.router.address) as client:
            asked = asking(client, POISON)
            for tries in range(2):
                worker, job = await at_work(*prefills)
                prefills.remove(worker)
                await job.begun.wait()
                reporter = await cluster.job("decode-0", tries)
                await reporter.begun.wait()
                gone = PeerRef(name=worker.name, incarnation=worker.incarnation)
                reporter.fail(Failure.CODE_RETRY, cause=Failure.CAUSE_PEER_LOST, blamed=[gone])
                with pytest.raises(TimeoutError):  # what must not happen meanwhile can't be waited for otherwise
                    await asyncio.wait_for(job.cancelled.wait(), 0.3)
                await worker.stop()
            with pytest.raises(InternalError, match="suspected of ending workers: 2"):
                await asked
            assert not prefills[0].jobs

    run(test)


class Endangered:
    """A worker that takes suspects as a real one does, and that the poison ends."""

    def __init__(self, name: str) -> None:
        self.fake = FakeWorker(name, "colocated", self._compute, suspected=self._decide)
        self._suspects: list[Job] = []

    def _decide(self, job: Job) -> None:
        self._suspects = [other for other in self._suspects if not other.cancelled.is_set()]
        if any(job.submit.on_trial or other.submit.on_trial for other in self._suspects):
            refuse(job)
        else:
            self._suspects.append(job)
            job.take()

    async def _compute(self, job: Job) -> None:
        if job.submit.token_ids[0] == POISON:
            await asyncio.sleep(0.1)
            await self.fake.server.stop(None)
            return
        for index in range(job.base, TOTAL):
            await asyncio.sleep(0.02)
            job.send(index, (token_at(index),), length_if(index == TOTAL - 1))
            if job in self._suspects and index - job.base + 1 in (job.submit.suspect_tokens, TOTAL - job.base):
                self._suspects.remove(job)


@pytest.mark.parametrize("lost", [1, 2])
def test_suspects_of_two_routers_are_tried_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    """Suspects are tried alone after the first lost worker, or after two where there was no time for trials before."""
    seconds = Suspicion.tried_by
    if lost == 2:
        monkeypatch.setattr(
            Suspicion, "tried_by", lambda self, longest: 0.0 if self.losses == 1 else seconds(self, longest)
        )

    async def test() -> None:
        workers = [Endangered(f"colocated-{at}").fake for at in range(5)]
        async with (
            fake_cluster(tmp_path, *workers) as cluster,
            second_router(cluster) as second,
            AsyncClient(cluster.router.address) as one,
            AsyncClient(second.address) as other,
        ):
            for client in (one, other):  # one request at each worker, at least
                await asyncio.gather(*(ask(client) for _ in range(2)))
            innocents = {20 + at: asking(client, 20 + at) for at, client in enumerate([one, other] * 12)}
            with pytest.raises(InternalError, match=f"suspected of ending workers: {lost + 1}"):
                await ask(one, POISON)
            retries = {first: (await innocent).timeline.retries for first, innocent in innocents.items()}
            jobs = [job for worker in workers for job in worker.jobs]
            tried = {job.submit.token_ids[0] for job in jobs if job.submit.on_trial and job.begun.is_set()}
            assert 0 < max(retries.values()) <= lost + 1
            # The last loss is one more for who has stood a trial by then and runs beside that of the poison.
            assert {first for first, count in retries.items() if count > lost} <= tried
            assert len([job for job in jobs if job.submit.token_ids[0] == POISON and job.begun.is_set()]) == lost + 1
            for router in (cluster.router, second):
                left = [view for view in router.registry.view() if view.ready]
                assert len(left) == len(workers) - lost - 1
                assert all(view.suspects == view.requests == 0 for view in left)

    run(test)
