"""Suspects are tried alone, and only a trial that has begun convicts: no innocent request fails with another one."""

import asyncio
from contextlib import AsyncExitStack
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
    fake,
    length_if,
    second_router,
    silent,
    token_at,
    until,
)
from support.scenes import Serve

TOTAL = 10
INNOCENT, POISON = [5, 9], [7, 9]
"""A prompt, and one that ends the workers that compute it."""
SECRET = "the text of a client"


def refuse(job: Job) -> None:
    """Refuses a suspect, as a worker does that has another one."""
    job.fail(Failure.CODE_RETRY, cause=Failure.CAUSE_TRIAL)


def colocated(*scripts: Script, **options: Any) -> list[FakeWorker]:
    return [fake(f"colocated-{at}", script, **options) for at, script in enumerate(scripts)]


async def at_work(*workers: FakeWorker) -> tuple[FakeWorker, Job]:
    """The first of these workers that gets a part, and the part."""
    found = await until(lambda: [worker for worker in workers if worker.jobs], "one has a part")
    return found[0], found[0].jobs[0]


@pytest.mark.parametrize("lives", [False, True])
async def test_a_worker_that_lives_or_is_lost_before_a_trial_begins_convicts_nobody(serve: Serve, lives: bool) -> None:
    """A worker lives if only its stream was lost. One that is lost before may have been lost in another router's trial,
    and its refusal with it."""
    workers = colocated(*[silent] * 3, suspected=Job.take if lives else lambda job: None)
    cluster = await serve(*workers)
    asked = cluster.asking(INNOCENT)
    for tries in range(2):
        worker, job = await at_work(*workers)
        assert (job.submit.suspect_tokens > 0) == job.submit.on_trial == (tries > 0)
        if lives:
            await job.begun.wait()
        workers.remove(worker)
        for left in workers if tries else ():
            left.suspected, left.script = Job.take, colocated_of()
        if lives and tries:
            worker.cut()
        else:
            await worker.stop()
    assert (await asked).timeline.retries == 2
    assert workers[0].jobs[0].submit.on_trial, "it is a suspect still"


@pytest.mark.parametrize("refused", ["prefill", "decode"])
async def test_a_trial_begins_when_each_worker_has_taken_the_suspect(serve: Serve, refused: str) -> None:
    lost, prefill, decode = fake("prefill-0", silent), fake("prefill-1"), fake("decode-0")
    once, other = (prefill, decode) if refused == "prefill" else (decode, prefill)

    def refuse_one(job: Job) -> None:
        if len([job for job in once.jobs if job.submit.suspect_tokens]) == 1:
            refuse(job)
        else:
            job.take()

    once.suspected = refuse_one
    cluster = await serve(lost, decode)
    asked = cluster.asking(INNOCENT)
    await cluster.job("prefill-0")
    await cluster.join(prefill)
    await cluster.ready("prefill-0", "prefill-1", "decode-0")
    await lost.stop()
    assert (await asked).timeline.retries == 1, "waiting for a trial is none"
    suspects = [job for job in other.jobs if job.submit.suspect_tokens]
    assert [job.begun.is_set() for job in suspects] == [False, True]
    await until(lambda: all(view.suspects == 0 for view in cluster.router.registry.view()), "none is left")


async def test_one_that_gets_no_trial_runs_beside_others_and_says_what_it_is(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspects, "TRIAL_SECONDS", 0.3)

    def busy(job: Job) -> None:
        if job.submit.on_trial:
            refuse(job)
        else:
            job.take()

    workers = colocated(silent, silent, suspected=busy)
    cluster = await serve(*workers)
    asked = cluster.asking(INNOCENT)
    lost, _ = await at_work(*workers)
    (other,) = set(cluster.workers.values()) - {lost}
    other.script = colocated_of()
    await lost.stop()
    assert (await asked).timeline.retries == 1
    first, last = other.jobs[0].submit, other.jobs[-1].submit
    assert (first.on_trial, last.on_trial) == (True, False)
    assert first.suspect_tokens == last.suspect_tokens > 0


async def test_one_that_is_refused_all_the_time_is_given_up(serve: Serve) -> None:
    workers = colocated(silent, silent, suspected=refuse)
    cluster = await serve(*workers, idle_timeout_seconds=1.0)
    asked = cluster.asking(INNOCENT)
    await (await at_work(*workers))[0].stop()
    with pytest.raises(Unavailable, match="other suspects are tried all the time"):
        await asked


async def test_a_loss_counts_that_the_other_worker_reports_first(serve: Serve) -> None:
    """The trial ends when the router itself loses the worker; the other worker's report alone doesn't end it."""
    prefills = [fake(f"prefill-{at}", silent) for at in range(3)]
    cluster = await serve(*prefills, fake("decode-0", silent))
    asked = cluster.asking(POISON)
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
        if list(job.submit.token_ids[:2]) == POISON:
            await asyncio.sleep(0.1)
            await self.fake.server.stop(None)
            return
        for index in range(job.base, TOTAL):
            await asyncio.sleep(0.02)
            job.send(index, (token_at(index),), length_if(index == TOTAL - 1))
            if job in self._suspects and index - job.base + 1 in (job.submit.suspect_tokens, TOTAL - job.base):
                self._suspects.remove(job)


@pytest.mark.parametrize("lost", [1, 2])
async def test_suspects_of_two_routers_are_tried_alone(
    serve: Serve, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: int
) -> None:
    """Suspects are tried alone after the first lost worker, or after two where there was no time for trials before."""
    seconds = Suspicion.tried_by
    if lost == 2:
        late = lambda self, longest: 0.0 if self.losses == 1 else seconds(self, longest)  # noqa: E731
        monkeypatch.setattr(Suspicion, "tried_by", late)
    workers = [Endangered(f"colocated-{at}").fake for at in range(5)]
    cluster = await serve(*workers)
    second = await stack.enter_async_context(second_router(cluster))
    one = cluster.client
    other = await stack.enter_async_context(AsyncClient(second.address))
    for client in (one, other):  # one request at each worker, at least
        await asyncio.gather(*(cluster.ask(INNOCENT, client=client) for _ in range(2)))
    innocents = {20 + at: cluster.asking([20 + at, 9], client=client) for at, client in enumerate([one, other] * 12)}
    with pytest.raises(InternalError, match=f"suspected of ending workers: {lost + 1}"):
        await cluster.ask(POISON, choice=[SECRET, "other"], logit_bias={77: 1.5}, top_k=12)
    (line,) = [vars(record) for record in caplog.records if record.message == "request suspected of ending workers"]
    assert (line["prompt_tokens"], line["sampling"]["max_tokens"], line["sampling"]["top_k"]) == (2, TOTAL, 12)
    assert not any(SECRET in str(vars(record)) for record in caplog.records)
    retries = {first: (await innocent).timeline.retries for first, innocent in innocents.items()}
    jobs = [job for worker in workers for job in worker.jobs]
    tried = {job.submit.token_ids[0] for job in jobs if job.submit.on_trial and job.begun.is_set()}
    assert 0 < max(retries.values()) <= lost + 1
    # The last loss is one more for who has stood a trial by then and runs beside that of the poison.
    assert {first for first, count in retries.items() if count > lost} <= tried
    assert len([job for job in jobs if list(job.submit.token_ids[:2]) == POISON and job.begun.is_set()]) == lost + 1
    for router in (cluster.router, second):
        left = [view for view in router.registry.view() if view.ready]
        assert len(left) == len(workers) - lost - 1
        assert all(view.suspects == view.requests == 0 for view in left)
    later = await asyncio.gather(*(cluster.ask(INNOCENT) for _ in range(4)))
    assert not any(completion.timeline.retries for completion in later)
