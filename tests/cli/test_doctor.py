"""`kvrelay doctor`: each trouble of a cluster is found, a healthy one has none, and nobody's silence makes it wait for
long; of a request, running or ended, the words name what delayed it."""

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from command import call

from kvrelay.cli.doctor.cluster_checks import clocks, members, pairs, pools, protection, reachable, transports, versions
from kvrelay.cli.doctor.examine import diagnose, examine, well
from kvrelay.cli.doctor.finding import Check, Examined, Reached
from kvrelay.cli.doctor.machine_checks import certificates, disks, gpus, kernels, limits, rdma
from kvrelay.cluster.membership.inquiry import ANSWER_SECONDS
from kvrelay.cluster.state import ClusterState, save
from kvrelay.internal.v1.describe_pb2 import (
    Amount,
    CertificateEnd,
    Description,
    Gpu,
    PairState,
    RdmaPort,
    TransportState,
)
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DEAD,
    MEMBER_STATE_READY,
    ROLE_DECODE,
    ROLE_PREFILL,
    DescribeResponse,
    GetStatusResponse,
    Member,
    MemberDescription,
    MemberStatus,
)
from kvrelay.internal.v1.worker_pb2 import (
    CONTEXT_LIMIT_POOL,
    Blocks,
    Failure,
    Load,
    PrefillReport,
    Requests,
    TransferReport,
)
from kvrelay.router.placing.placement import DecodeCapacity, Demand, WorkerView, why_waiting
from kvrelay.rpc.identity import WorkerId, WorkerRole
from kvrelay.worker.description import driver_rows, rdma_ports
from support.processes import ProcessCluster, process_cluster, wait_until
from support.router_fakes import FakeCluster, FakeWorker, Job, decode_of, key_file, pair, token_at, until
from support.scenes import Serve

NOW = 1_800_000_000.0
DAY = 86400.0
EVERYONE = {"supervisor", "router-0", "prefill-0", "decode-0"}


def described(device: str = "cpu", **more: object) -> Description:
    """A worker without any trouble."""
    told = Description(
        host="h",
        device=device,
        checksum=True,
        encrypt="none",
        tls="off",
        kv_bytes=2**28,
        max_context=4096,
        heard_unix=NOW + 0.01,
        told_unix=NOW + 0.02,
        versions={"kvrelay": "0.1.0", "torch": "2.13.0"},
        amounts=[
            Amount(name="open files", used=50, limit=65536),
            Amount(name="locked memory", used=-1, limit=-1),
            Amount(name="shared memory", used=0, limit=2**33),
            Amount(name="disk /", used=2**30, limit=2**36),
        ],
    )
    for name, value in more.items():
        told.ClearField(name)  # type: ignore[arg-type]  # a field's name
        told.MergeFrom(Description(**{name: value}))  # type: ignore[arg-type]  # as above
    return told


def cluster(prefill: Description | None = None, decode: Description | None = None, **more: object) -> Examined:
    """A pair, its prefill worker being as described."""
    tell = {"prefill-0": prefill or pairing(), "decode-0": decode or described()}
    roles = {"prefill-0": ROLE_PREFILL, "decode-0": ROLE_DECODE}
    load = Load(blocks=Blocks(total=100, size=16, free=100))
    status = GetStatusResponse(
        ready=True,
        members=[
            MemberStatus(
                member=Member(name=name, role=roles[name], state=MEMBER_STATE_READY, compatibility="same"), load=load
            )
            for name in tell
        ],
    )
    answers = [
        MemberDescription(name=name, description=each, asked_unix=NOW, answered_unix=NOW + 0.03)
        for name, each in tell.items()
    ]
    return Examined(ClusterState(None, "test"), status, DescribeResponse(members=answers), **more)  # type: ignore[arg-type]


def pairing(transport: str = "shm", **more: object) -> Description:
    return described(pairs=[PairState(peer="decode-0", transport=transport, epoch=1)], **more)


def gpu(**more: object) -> list[Gpu]:
    return [Gpu(index=0, name="H", driver="1", mig="Disabled", ecc_errors=0, **more)]  # type: ignore[arg-type]


def amount(name: str, used: float, limit: float) -> list[Amount]:
    return [Amount(name=name, used=used, limit=limit)]


def ports(state: str = "ACTIVE", gid: str = "fe80::1") -> list[RdmaPort]:
    return [RdmaPort(name="mlx5_0/1", state=state, link_layer="InfiniBand", gid=gid)]


def test_a_healthy_cluster_has_no_trouble() -> None:
    findings = diagnose(cluster())
    assert well(findings), findings
    assert {"members", "versions", "pairs", "clocks", "limits", "transports", "KV pools"} <= findings.keys()


@pytest.mark.parametrize(
    ("check", "prefill", "severity", "words"),
    [
        (versions, pairing(versions={"kvrelay": "0.2.0"}), "warning", "differs: 0.1.0: decode-0; 0.2.0: prefill-0"),
        (clocks, pairing(heard_unix=NOW + 5, told_unix=NOW + 5.01), "warning", "prefill-0's is the furthest ahead"),
        (clocks, pairing(heard_unix=NOW - 5, told_unix=NOW - 4.9), "warning", "prefill-0's behind"),
        (transports, pairing(""), "error", "no transport"),
        (protection, pairing(checksum=False), "error", "damaged KV would become wrong tokens"),
        (protection, pairing(host="other"), "note", "not encrypted"),
        (pools, pairing(context_limit=CONTEXT_LIMIT_POOL), "warning", "it limits contexts to 4096 tokens"),
        (pools, pairing(max_context=100), "warning", "differs between workers: 100: prefill-0; 4096: decode-0"),
        (limits, pairing(amounts=amount("open files", 1, 1024)), "warning", "may open 1024 files"),
        (limits, pairing(amounts=amount("open files", 1000, 1024)), "error", "1000 of 1024 open files"),
        (limits, pairing(amounts=amount("memory", 95, 100)), "warning", "of its control group"),
        (limits, pairing(amounts=amount("shared memory", 0, 2**20)), "warning", "1.0 MiB of /dev/shm"),
        (
            limits,
            pairing(rdma_ports=ports(), amounts=amount("locked memory", -1, 65536)),
            "warning",
            "RDMA has to lock its buffers",
        ),
        (disks, pairing(amounts=amount("disk /", 99, 100)), "error", "1 bytes of 100 bytes are free"),
        (certificates, pairing(certificates=[CertificateEnd(file="w.crt", expires_unix=1)]), "error", "w.crt ended"),
        (
            certificates,
            pairing(certificates=[CertificateEnd(file="w.crt", expires_unix=time.time() + 5.5 * DAY)]),
            "warning",
            "in 5 days",
        ),
        (gpus, pairing(device="cuda", gpus=gpu(unreachable=[1])), "note", "can't reach the memory of GPU 1"),
        (gpus, pairing(gpus=gpu()), "warning", "computes on the CPU, though it has a GPU"),
        (kernels, pairing(kernels_missing="c++ failed: no"), "warning", "computes with torch, which is slower"),
        (kernels, pairing(kernels_missing="c++ failed: no"), "warning", "c++ failed: no"),
        (rdma, pairing(rdma_ports=ports("DOWN")), "warning", "DOWN"),
        (rdma, pairing(rdma_ports=ports(gid="")), "warning", "without a GID"),
        (rdma, pairing(rdma_ports=ports(), gpus=gpu()), "warning", "nvidia_peermem is not loaded"),
    ],
)
def test_each_trouble_is_found(check: Check, prefill: Description, severity: str, words: str) -> None:
    findings = list(check(cluster(prefill)))
    assert any(found.severity == severity and words in found.found for found in findings), findings
    if severity in ("warning", "error"):
        assert not well(diagnose(cluster(prefill)))


def test_clocks_are_compared_with_one_another() -> None:
    ahead, behind = ({"heard_unix": NOW + by + 0.01, "told_unix": NOW + by + 0.02} for by in (0.7, -0.7))
    (close,) = clocks(cluster(pairing(**ahead)))
    assert (close.severity, close.found[:21]) == ("ok", "at most 0.700 s apart")
    (far,) = clocks(cluster(pairing(**ahead), described(**behind)))
    assert (far.severity, far.found[:21]) == ("warning", "at most 1.400 s apart")
    assert list(clocks(Examined(ClusterState(None, "test"), None))) == []


def test_memory_errors_of_a_gpu_and_slow_links_between_gpus_are_found() -> None:
    broken = [Gpu(index=0, name="H", driver="1", ecc_errors=3)]
    assert any(found.severity == "error" for found in gpus(cluster(pairing(device="cuda", gpus=broken))))
    missing = [TransportState(name="nccl", missing="NCCL is 2.20")]
    both = cluster(pairing("tcp", device="cuda", transports=missing), described("cuda"))
    (pair, *_) = transports(both)
    assert (pair.severity, pair.advice) == ("warning", "nccl: NCCL is 2.20")


def test_members_that_are_dead_silent_or_unpaired_are_found() -> None:
    examined = cluster()
    status, answers = examined.status, examined.described
    assert status is not None
    assert answers is not None
    status.members[0].member.state = MEMBER_STATE_DEAD
    answers.members[1].ClearField("description")
    found = {finding.subject: finding for finding in members(examined)}
    assert (found["prefill-0"].severity, found["prefill-0"].found) == ("error", "is dead")
    assert (found["decode-0"].severity, found["decode-0"].found) == ("warning", "did not describe itself in time")
    status.members[0].member.state = MEMBER_STATE_READY
    status.members[0].member.compatibility = "other"
    assert any(finding.severity == "error" for finding in pairs(examined))
    assert all(each for each in reachable(cluster(reached=(Reached("page", ""),))))
    assert [each.severity for each in reachable(cluster(reached=(Reached("page", "refused"),)))] == ["warning"]


def test_every_check_bears_a_lost_supervisor() -> None:
    findings = diagnose(Examined(ClusterState(None, "test"), None))
    assert [found.severity for found in findings["members"]] == ["error"]


def test_rdma_ports_and_the_driver_s_table_are_read(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text("InfiniBand\n")
    (port / "gids" / "0").write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    (port / "gids" / "10").write_text("fe80:0000:0000:0000:0000:0000:0000:0002\n")
    (port / "gids" / "2").write_text("fe80:0000:0000:0000:0000:0000:0000:0001\n")
    (found,) = rdma_ports(tmp_path)
    assert (found.name, found.state, found.link_layer) == ("mlx5_0/1", "ACTIVE", "InfiniBand")
    assert found.gid.endswith("0001")
    assert list(rdma_ports(tmp_path / "none")) == []
    rows = driver_rows("GPU-1, 570.1, 3, Disabled, 0\nbroken\n")
    assert rows["GPU-1"]["driver_version"] == "570.1"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    modules = {"prefill": "support.hash_worker", "decode": "support.hash_worker"}
    with process_cluster(folder, "pico", modules=modules) as it:
        yield it


def asked(it: ProcessCluster, *arguments: str) -> Result:
    """`kvrelay doctor` about this cluster."""
    save(ClusterState(None, "test", supervisor=it.supervisor, router=it.router))
    return call("doctor", *arguments)


def test_every_member_describes_itself(running: ProcessCluster) -> None:
    result = asked(running, "--json")
    shown = json.loads(result.stdout)
    members = {found["subject"] for found in shown["checks"]["limits"]}
    assert members == EVERYONE
    (clocks,) = shown["checks"]["clocks"]
    assert clocks["severity"] == "ok"
    assert any(found["subject"] == "prefill-0 -> decode-0" for found in shown["checks"]["transports"])
    formats = {found["subject"]: found["found"] for found in shown["checks"]["formats"]}
    assert formats == dict.fromkeys(("prefill-0", "decode-0"), "weights are float32, KV is float32")
    troubles = [found for each in shown["checks"].values() for found in each if found["severity"] == "error"]
    assert troubles == []
    assert (result.exit_code == 0) == shown["ok"]
    assert "prefill-0 -> decode-0" in asked(running).stdout


def test_questions_at_the_same_time_all_get_answers(running: ProcessCluster) -> None:
    state = ClusterState(None, "test", supervisor=running.supervisor)
    with ThreadPoolExecutor(4) as pool:
        for examined in pool.map(lambda _: examine(state), range(4)):
            assert set(examined.descriptions) == EVERYONE


@pytest.mark.more
def test_a_frozen_member_is_named_in_bounded_time(running: ProcessCluster) -> None:
    worker = running.processes["decode-0"]
    worker.popen.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        result = asked(running, "--json")
        assert time.monotonic() - began < ANSWER_SECONDS + 20
        assert result.exit_code == 1
        assert "decode-0" in [found["subject"] for found in json.loads(result.stdout)["checks"]["members"]]
    finally:
        worker.popen.send_signal(signal.SIGKILL)
        running.replace("decode-0")
    wait_until(lambda: asked(running, "--json").exit_code == 0, "well again", 60)


# Requests.


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
    cluster = await serve(*pair(), backlog_share=0.0)
    blocks = Blocks(total=100, size=16, free=60, held=40)
    cluster.workers["decode-0"].report_load(Load(blocks=blocks, requests=Requests(running=9, free_slots=0)))
    await until(
        lambda: any(view.capacity and not view.capacity.free_slots for view in cluster.router.registry.view()),
        "the report has come",
    )
    running = asyncio.create_task(cluster.client.complete([1, 2, 3], max_tokens=3, temperature=0, request_id="mine"))
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
            await decode_of()(job)

    prefill, _ = pair()
    decodes = [FakeWorker(f"decode-{index}", "decode", moody) for index in range(3)]
    cluster = await serve(prefill, *decodes)
    await cluster.client.complete([1, 2, 3], max_tokens=3, temperature=0, request_id="mine")
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
        job.send(job.base, (token_at(job.base),), prefill=report)
        transfer = TransferReport(
            transfer_seconds=1.5, handoff_seconds=0.5, transfer_bytes=3 * 2**20, grant_seconds=0.75
        )
        job.send(transfer=transfer)

    workers = FakeWorker("prefill-0", "prefill", prefill), pair()[1]
    cluster = await serve(*workers)
    await cluster.client.complete([1, 2, 3], max_tokens=3, temperature=0, request_id="mine")
    parts = {part["stage"]: part for part in (await story(cluster, "mine"))["parts"]}
    assert "with 1 more from its cache" in parts["prefill"]["text"]
    assert parts["transfer"]["seconds"] == pytest.approx(0.5)
    for words in ("3.0 MiB", "500.0 ms of it after the end of prefill", "granted blocks for it after 750.0 ms"):
        assert words in parts["transfer"]["text"]


async def test_a_failure_is_told_with_its_reason(serve: Serve) -> None:
    cluster = await serve(*pair(), worker_wait_seconds=0.0)
    client = cluster.client_of(resume_seconds=0.0)
    cluster.announce(decode_0=MEMBER_STATE_DEAD)
    await cluster.ready("prefill-0")
    with pytest.raises(Exception, match="no worker"):
        await client.complete([1, 2, 3], max_tokens=3, request_id="mine")
    found = await ask(cluster, "mine", "--json")
    assert "no worker can take the request now" in json.loads(found.stdout)[0]["verdict"]


async def test_a_tenant_sees_its_own_requests_only(serve: Serve, tmp_path: Path) -> None:
    cluster = await serve(*pair(), api_keys=key_file(tmp_path, a="", b=""))
    client = cluster.client_of(api_key="a")
    await client.complete([1, 2, 3], max_tokens=3, temperature=0, request_id="mine")
    assert (await ask(cluster, "mine", "--api-key", "a")).exit_code == 0
    other = await ask(cluster, "mine", "--api-key", "b")
    assert "no router knows request 'mine'" in other.stderr
    assert "API key" in (await ask(cluster, "mine")).stderr


async def test_unknown_requests_and_routers_are_named(serve: Serve) -> None:
    cluster = await serve(*pair())
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
