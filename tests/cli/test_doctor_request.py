"""`kvrelay doctor REQUEST_ID`: the words name what delayed a request, of running and of ended ones."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from command import call

from kvrelay.client import AsyncClient
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD
from kvrelay.internal.v1.worker_pb2 import Blocks, Failure, Load, PrefillReport, Requests, TransferReport
from kvrelay.router.placing.placement import DecodeCapacity, Demand, WorkerView, why_waiting
from kvrelay.rpc.identity import WorkerId, WorkerRole
from support.page import KEYS
from support.router_fakes import FakeCluster, FakeWorker, Job, decode_of, pair, until
from support.scenes import Serve


def token(index: int) -> int:
    return 40 + index


async def ask(cluster: FakeCluster, *arguments: str, also: str = "") -> Result:
    """The command, in a thread: it has an event loop of its own."""
    target = f"http://{cluster.router.http_address}{also}"
    return await asyncio.to_thread(call, "doctor", *arguments, "--target", target)


async def story(cluster: FakeCluster, name: str) -> dict[str, Any]:
    result = await ask(cluster, name, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found) == 1
    return dict(found[0])


async def test_a_wait_for_decode_slots_is_named_while_it_lasts_and_afterwards(serve: Serve) -> None:
    cluster = await serve(*pair(token), backlog_share=0.0)
    async with AsyncClient(cluster.router.address) as client:
        blocks = Blocks(total=100, size=16, free=60, held=40)
        cluster.workers["decode-0"].report_load(Load(blocks=blocks, requests=Requests(running=9, free_slots=0)))
        await until(
            lambda: any(view.capacity and not view.capacity.free_slots for view in cluster.router.registry.view()),
            "the report has come",
        )
        running = asyncio.create_task(client.complete([1, 2, 3], max_tokens=3, temperature=0, request_id="mine"))
        await until(lambda: cluster.router.waiting == 1, "it waits")
        waiting = await story(cluster, "mine")
        assert "running for" in waiting["headline"]
        assert "all decode slots were taken" in waiting["verdict"]
        cluster.workers["decode-0"].report_load(Load(blocks=blocks, requests=Requests(free_slots=8)))
        await running
        ended = await story(cluster, "cmpl-mine")
        assert "completed" in ended["headline"]
        (router,) = [part for part in ended["parts"] if part["stage"] == "router"]
        assert "all decode slots were taken" in router["text"]
        assert router["seconds"] > 0


async def test_a_failed_attempt_and_a_migration_are_named(serve: Serve) -> None:
    failed: list[Job] = []

    async def moody(job: Job) -> None:
        failed.append(job)
        if len(failed) == 1:
            job.fail(Failure.CODE_RETRY, "the link broke", cause=Failure.CAUSE_LINK)
        elif len(failed) == 2:
            job.fail(Failure.CODE_RETRY, "this worker stops", cause=Failure.CAUSE_DRAINING)
        else:
            await decode_of(token)(job)

    prefill, _ = pair(token)
    decodes = [FakeWorker(f"decode-{index}", "decode", moody) for index in range(3)]
    cluster = await serve(prefill, *decodes)
    async with AsyncClient(cluster.router.address) as client:
        await client.complete([1, 2, 3], max_tokens=3, temperature=0, request_id="mine")
        found = await story(cluster, "mine")
        assert "placed 3 times" in found["verdict"]
        assert "the link broke" in found["verdict"]
        assert "its worker was stopped on purpose" in found["verdict"]
        assert any("moved to other workers" in line for line in found["incidents"])
        text = (await ask(cluster, "mine")).stdout
        assert "the link broke" in text


async def test_slow_prefill_and_a_late_grant_are_told_apart(serve: Serve) -> None:
    async def prefill(job: Job) -> None:
        report = PrefillReport(queue_seconds=0.1, prefill_seconds=2.0, cached_tokens=1)
        job.send(job.base, (token(job.base),), prefill=report)
        transfer = TransferReport(
            transfer_seconds=1.5, handoff_seconds=0.5, transfer_bytes=3 * 2**20, grant_seconds=0.75
        )
        job.send(transfer=transfer)

    workers = FakeWorker("prefill-0", "prefill", prefill), pair(token)[1]
    cluster = await serve(*workers)
    async with AsyncClient(cluster.router.address) as client:
        await client.complete([1, 2, 3], max_tokens=3, temperature=0, request_id="mine")
        parts = {part["stage"]: part for part in (await story(cluster, "mine"))["parts"]}
        assert "with 1 more from its cache" in parts["prefill"]["text"]
        assert parts["transfer"]["seconds"] == pytest.approx(0.5)
        for words in ("3.0 MiB", "500.0 ms of it after the end of prefill", "granted blocks for it after 750.0 ms"):
            assert words in parts["transfer"]["text"]


async def test_a_failure_is_told_with_its_reason(serve: Serve) -> None:
    cluster = await serve(*pair(token), worker_wait_seconds=0.0)
    async with AsyncClient(cluster.router.address, resume_seconds=0.0) as client:
        cluster.announce(decode_0=MEMBER_STATE_DEAD)
        await cluster.ready("prefill-0")
        with pytest.raises(Exception, match="no worker"):
            await client.complete([1, 2, 3], max_tokens=3, request_id="mine")
        found = await ask(cluster, "mine", "--json")
        assert "no worker can take the request now" in json.loads(found.stdout)[0]["verdict"]


async def test_a_tenant_sees_its_own_requests_only(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS.format(*(hashlib.sha256(key).hexdigest() for key in (b"key of a", b"key of b"))))
    cluster = await serve(*pair(token), api_keys=str(keys))
    async with AsyncClient(cluster.router.address, api_key="key of a") as client:
        await client.complete([1, 2, 3], max_tokens=3, temperature=0, request_id="mine")
        assert (await ask(cluster, "mine", "--api-key", "key of a")).exit_code == 0
        other = await ask(cluster, "mine", "--api-key", "key of b")
        assert "no router knows request 'mine'" in other.stderr
        assert "API key" in (await ask(cluster, "mine")).stderr


async def test_unknown_requests_and_routers_are_named(serve: Serve) -> None:
    cluster = await serve(*pair(token))
    result = await ask(cluster, "nobody")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert "no router knows request 'nobody'" in result.stderr
    assert "latest 200" in result.stderr
    assert "127.0.0.1:1" in (await ask(cluster, "nobody", also=",http://127.0.0.1:1")).stderr


def view(role: WorkerRole, *, ready: bool = True, pending: int = 0, slots: int = 8, free: int = 50) -> WorkerView:
    capacity = DecodeCapacity(16, 100, free, slots) if role == "decode" else None
    return WorkerView(
        WorkerId(f"{role}-0", "i"), role, ready, pending_tokens=pending, kv_tokens=1600, capacity=capacity
    )


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ([], "no worker that decodes was ready"),
        ([view("prefill")], "no worker that decodes was ready"),
        ([view("prefill"), view("decode", ready=False)], "no worker that decodes was ready"),
        ([view("prefill"), view("decode", slots=0)], "all decode slots were taken"),
        ([view("prefill"), view("decode", free=1)], "no decode worker had KV blocks free for 100 tokens"),
        (
            [view("prefill", pending=900), view("decode")],
            "prefill-0 had 500 tokens or more of other prompts to compute, or 16 prompts",
        ),
        ([view("colocated", pending=900)], "colocated-0 had 500 tokens"),
        ([view("prefill"), view("decode")], "other requests were before it"),
    ],
)
def test_the_reason_of_a_wait_follows_from_the_workers(workers: list[WorkerView], words: str) -> None:
    assert words in why_waiting(Demand(100, 10), workers, 500)
