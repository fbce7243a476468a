"""Classes of service: how requests choose one, what the answer says of it, and what workers are told."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvrelay.client import KvrelayError
from kvrelay.internal.v1.worker_pb2 import Failure, Load, Urgency
from kvrelay.router.config import ServiceClass
from support.http_calls import CHAT, HELLO
from support.router_fakes import (
    FakeWorker,
    Job,
    colocated_of,
    fake,
    first_attempt,
    key_file,
    pair,
    token_at,
    until,
)
from support.scenes import Serve

CLASSES = {
    "interactive": ServiceClass(ttft_target_seconds=30.0, tpot_target_seconds=0.5),
    "chat": ServiceClass(priority=-2, tpot_target_seconds=0.25),
}
RANKS = {"default": 0, "interactive": 0, "batch": 1, "chat": -2}
TTFT_TARGETS = {"default": 0.0, "interactive": 30.0, "batch": 0.0, "chat": 0.0}
BODIES = {"/v1/completions": HELLO, "/v1/chat/completions": CHAT}
TIERS: list[tuple[dict[str, str], str, str]] = [
    ({"service_tier": "auto"}, "default", "default"),
    ({"service_tier": "default"}, "default", "default"),
    ({"service_tier": "scale"}, "default", "default"),
    ({"service_tier": "flex"}, "batch", "flex"),
    ({"service_tier": "priority"}, "interactive", "priority"),
    ({"slo_class": "interactive"}, "interactive", "priority"),
    ({"slo_class": "batch", "service_tier": "auto"}, "batch", "flex"),
    ({"slo_class": "batch", "service_tier": "flex"}, "batch", "flex"),
    ({"slo_class": "chat"}, "chat", "chat"),
]


def check_urgency(urgency: Urgency, service: str, priority: int) -> None:
    ttft = TTFT_TARGETS[service]
    assert (urgency.rank, urgency.priority) == (RANKS[service], priority)
    if ttft:
        assert 0 < urgency.first_token_seconds < ttft, "a part of the time has passed"
    else:
        assert urgency.first_token_seconds == 0


def urgencies(workers: tuple[FakeWorker, ...]) -> list[Urgency]:
    """Urgency of the latest part at each worker."""
    return [worker.jobs[-1].submit.urgency for worker in workers]


@pytest.mark.parametrize("path", BODIES)
async def test_http_chooses_by_either_name_and_the_answer_says_which_served(serve: Serve, path: str) -> None:
    workers = pair()
    cluster = await serve(*workers, classes=CLASSES)
    for given, service, tier in TIERS:
        status, answer = await cluster.http.post(path, {**BODIES[path], **given, "priority": 7})
        assert (status, answer["service_tier"]) == (200, tier), given
        for urgency in urgencies(workers):
            check_urgency(urgency, service, 7)
        chunks = await cluster.http.stream(path, {**BODIES[path], **given})
        assert {chunk["service_tier"] for chunk in chunks} == {tier}
        assert cluster.metric("kvrelay_router_requests_total", **{"class": service, "outcome": "length"}) > 0
    status, answer = await cluster.http.post(path, BODIES[path])
    assert (status, "service_tier" in answer) == (200, False), "it was not asked for"


async def test_grpc_chooses_by_slo_class(serve: Serve) -> None:
    workers = pair()
    cluster = await serve(*workers, classes=CLASSES)
    for service in ("", *RANKS):
        await cluster.client.complete("hello", max_tokens=4, slo_class=service, priority=-1)
        for urgency in urgencies(workers):
            check_urgency(urgency, service or "default", -1)
    with pytest.raises(KvrelayError, match="slo_class is 'x'; allowed: 'default', 'interactive', 'batch', 'chat', or"):
        await cluster.client.complete("hello", max_tokens=4, slo_class="x")


async def test_only_classes_behind_interactive_yield(serve: Serve) -> None:
    """A worker that has half of what it gets ahead gets prompts of all other classes."""
    prefill, decode = pair()
    cluster = await serve(prefill, decode, classes=CLASSES, prefill_ahead_tokens=100)
    await cluster.report("prefill-0", Load(pending_tokens=60))
    batch = cluster.asking(slo_class="batch")
    await until(lambda: cluster.router.waiting == 1, "batch waits")
    for service in ("default", "interactive", "chat"):
        prefill.report_load(Load(pending_tokens=60))
        await cluster.ask(slo_class=service)
    assert not batch.done()
    await cluster.report("prefill-0", Load(pending_tokens=40))
    await batch


async def test_a_stream_that_has_begun_is_as_urgent_as_its_next_token(serve: Serve) -> None:
    """The decode worker fails the stream behind some tokens; the next attempt has no first token to wait for."""

    async def fails(job: Job) -> None:
        job.send(job.base + 1, (token_at(job.base + 1),))
        await job.shown(2)
        job.fail(Failure.CODE_RETRY)

    prefill = fake("prefill-0")
    cluster = await serve(prefill, fake("decode-0", first_attempt(fails)), classes=CLASSES)
    await cluster.ask(count=6, slo_class="interactive")
    first, second = (job.submit.urgency for job in prefill.jobs)
    check_urgency(first, "interactive", 0)
    assert second.first_token_seconds < 0.5, "the next token is due one TPOT after the latest one"
    assert second.rank == 0


@pytest.mark.parametrize("form", [{"prompt": [[5, 6]] * 3}, {"prompt": [5, 6], "n": 3}], ids=["prompts", "n"])
async def test_a_completion_waits_for_its_place_as_long_as_its_class_allows(
    serve: Serve, tmp_path: Path, form: dict[str, Any]
) -> None:
    """The key may have one at once, so the last one begins after the router's own limit."""

    async def slow(job: Job) -> None:
        await asyncio.sleep(0.4)
        await colocated_of()(job)

    patient = {"batch": ServiceClass(first_token_timeout_seconds=60.0)}
    keys = key_file(tmp_path, a="concurrent=1")
    cluster = await serve(fake("colocated-0", slow), api_keys=keys, first_token_timeout_seconds=0.6, classes=patient)
    body = {**form, "max_tokens": 2, "slo_class": "batch"}
    status, answer = await cluster.http.post("/v1/completions", body, headers=[("authorization", "Bearer a")])
    assert status == 200, answer
    assert len(answer["choices"]) == 3
