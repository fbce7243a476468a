"""The router as a process: health, reflection, limits, refusal of what it can't serve, start and stop."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from kvrelay.client import AsyncClient, Exhausted, Unavailable
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD, MEMBER_STATE_READY, MEMBER_STATE_STARTING, ROLE_ROUTER
from kvrelay.internal.v1.worker_pb2 import RelayRequest
from kvrelay.router.config import RouterConfig
from kvrelay.router.server import RouterServer
from support.processes import Process
from support.router_fakes import (
    FakeWorker,
    Script,
    colocated_of,
    decode_of,
    fake_cluster,
    pair,
    prefill_of,
    run,
    silent,
    until,
)
from support.tokenizers import model_folder

SERVICE = "kvrelay.v1.InferenceService"
TIMEOUT = 30


def token_at(index: int) -> int:
    return 40 + index


def test_health_says_whether_a_request_can_be_placed(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            fake_cluster(tmp_path, *pair(token_at), worker_wait_seconds=0.0) as cluster,
            grpc.aio.insecure_channel(cluster.router.address) as channel,
        ):
            stub = HealthStub(channel)

            async def wait_for(status: HealthCheckResponse.ServingStatus) -> None:
                for service in ("", SERVICE):
                    async with asyncio.timeout(5):
                        async for response in stub.Watch(HealthCheckRequest(service=service)):
                            if response.status == status:
                                break

            await wait_for(HealthCheckResponse.SERVING)
            cluster.announce(decode_0=MEMBER_STATE_DEAD)
            await wait_for(HealthCheckResponse.NOT_SERVING)
            async with AsyncClient(cluster.router.address, timeout=10) as client:
                with pytest.raises(Unavailable, match="no worker can take the request now"):
                    await client.complete("hello")
                worker = FakeWorker("colocated-0", "colocated", colocated_of(token_at))
                await worker.start()
                cluster.supervisor.announce(worker.member())
                await wait_for(HealthCheckResponse.SERVING)
                assert (await client.complete("hello", max_tokens=3)).token_ids == (40, 41, 42)
            await worker.stop()
            await wait_for(HealthCheckResponse.NOT_SERVING)

    run(test)


class SlowToAnswer(FakeWorker):
    """Takes connections, and says hello when `ready` is set."""

    def __init__(self, name: str, role: str, script: Script) -> None:
        super().__init__(name, role, script)
        self.dialed, self.ready = asyncio.Event(), asyncio.Event()

    async def Relay(self, request_iterator: AsyncIterator[RelayRequest], context: Any) -> None:
        self.dialed.set()
        await self.ready.wait()
        await super().Relay(request_iterator, context)


@pytest.mark.parametrize("answers", [True, False])
def test_a_router_that_starts_is_ready_when_it_has_dialed_each_worker(tmp_path: Path, answers: bool) -> None:
    """A decode worker would compute the first prompts itself."""

    async def test() -> None:
        prefill = SlowToAnswer("prefill-0", "prefill", prefill_of(token_at))
        decode = FakeWorker("decode-0", "decode", decode_of(token_at))
        async with fake_cluster(tmp_path) as cluster:
            for worker in (prefill, decode):
                await worker.start()
            cluster.supervisor.announce(prefill.member(), decode.member())
            await prefill.dialed.wait()
            await until(lambda: [view.id.name for view in cluster.router.registry.view() if view.ready], "a worker")
            assert not cluster.router.registry.complete
            if answers:
                prefill.ready.set()
            else:
                await prefill.stop()
            await until(lambda: cluster.router.registry.complete, "the router is ready")
            for worker in (prefill, decode):
                await worker.stop()

    run(test)


def test_the_supervisor_gets_the_routers_heartbeats(tmp_path: Path) -> None:
    async def test() -> None:
        async with fake_cluster(tmp_path) as cluster:
            heard = cluster.supervisor.heard
            member = await until(lambda: heard.get("router-0"), "a heartbeat")
            assert (member.role, member.state) == (ROLE_ROUTER, MEMBER_STATE_STARTING)
            assert member.address == cluster.router.address
            async with AsyncClient(cluster.router.address, timeout=10) as client:
                with pytest.raises(Unavailable, match="no worker is ready yet"):
                    await client.model_info()
            worker = FakeWorker("colocated-0", "colocated", colocated_of(token_at))
            await worker.start()
            cluster.supervisor.announce(worker.member())
            await until(lambda: heard["router-0"].state == MEMBER_STATE_READY, "the router reports that it is ready")
            await worker.stop()
            cluster.supervisor.fenced = True
            cluster.supervisor.announce()
            reason = await asyncio.wait_for(cluster.router.failed(), 5)
            assert "declared dead" in str(reason)

    run(test)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_describes_every_service(tmp_path: Path, version: str) -> None:
    reflection = f"grpc.reflection.{version}.ServerReflection"

    async def ask(channel: grpc.aio.Channel, **request: str) -> ServerReflectionResponse:
        method = channel.stream_stream(
            f"/{reflection}/ServerReflectionInfo",
            request_serializer=ServerReflectionRequest.SerializeToString,
            response_deserializer=ServerReflectionResponse.FromString,
        )
        (answer,) = [answer async for answer in method(iter([ServerReflectionRequest(**request)]), timeout=TIMEOUT)]
        return answer

    async def test() -> None:
        async with (
            fake_cluster(tmp_path, *pair(token_at)) as cluster,
            grpc.aio.insecure_channel(cluster.router.address) as channel,
        ):
            listed = (await ask(channel, list_services="")).list_services_response.service
            names = {service.name for service in listed}
            assert {SERVICE, "grpc.health.v1.Health", reflection} <= names
            for name in names:
                files = (await ask(channel, file_containing_symbol=name)).file_descriptor_response
                services = {
                    f"{file.package}.{service.name}"
                    for file in map(FileDescriptorProto.FromString, files.file_descriptor_proto)
                    for service in file.service
                }
                assert name in services

    run(test)


def test_one_request_too_many_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", silent)
        async with (
            fake_cluster(tmp_path, worker, max_requests=2) as cluster,
            AsyncClient(cluster.router.address) as client,
        ):
            running = [asyncio.create_task(client.complete("hello", max_tokens=3)) for _ in range(2)]
            await cluster.job("colocated-0", 1)
            with pytest.raises(Exhausted, match="max_requests") as caught:
                await client.complete("hello")
            assert caught.value.retry_after == 1.0
            for job in worker.jobs:
                await colocated_of(token_at)(job)
            await asyncio.gather(*running)
            worker.script = colocated_of(token_at)
            await client.complete("hello", max_tokens=3)

    run(test)


def test_a_new_request_waits_for_the_replacement_of_a_lost_worker(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            fake_cluster(tmp_path, *pair(token_at)) as cluster,
            AsyncClient(cluster.router.address, timeout=20) as client,
        ):
            cluster.announce(decode_0=MEMBER_STATE_DEAD)
            await until(lambda: not cluster.router.registry.complete, "it is lost")
            waiting = [asyncio.create_task(client.complete("hello", max_tokens=3)) for _ in range(20)]
            worker = FakeWorker("colocated-0", "colocated", colocated_of(token_at))
            await worker.start()
            await asyncio.wait(waiting, timeout=0.2)
            assert not any(task.done() for task in waiting)
            cluster.supervisor.announce(worker.member())
            for completion in await asyncio.gather(*waiting):
                assert completion.token_ids == (40, 41, 42)
                assert completion.timeline.retries == 0
            await worker.stop()

    run(test)


def test_a_worker_of_another_model_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        ours = FakeWorker("colocated-0", "colocated", colocated_of(token_at))
        odd = FakeWorker("colocated-1", "colocated", silent, fingerprint="0" * 64)
        small = FakeWorker("colocated-2", "colocated", colocated_of(token_at), max_context=32)
        async with fake_cluster(tmp_path, ours) as cluster, AsyncClient(cluster.router.address, timeout=10) as client:
            for worker in (odd, small):
                await worker.start()
            cluster.supervisor.announce(ours.member(), odd.member(), small.member())
            await until(lambda: odd.streams, "the odd worker was reached")
            await cluster.ready("colocated-0", "colocated-2")
            assert (await client.model_info()).max_context == 32
            for _ in range(6):
                await client.complete("hello", max_tokens=2)
            assert not odd.jobs
            assert len(ours.jobs) == len(small.jobs) == 3
            # Without the other workers, its model is the cluster's.
            odd.script = colocated_of(token_at)
            cluster.supervisor.announce(odd.member())
            await ours.stop()
            await small.stop()
            await cluster.ready("colocated-1")
            await client.complete("hello", max_tokens=2)
            await odd.stop()

    run(test)
    assert any("another model" in record.message and record.worker == "colocated-1" for record in caplog.records)


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    async def test() -> None:
        model = str(model_folder(tmp_path))
        first = RouterServer(RouterConfig(model=model, grpc_port=0, http_port=None))
        port = await first.start()
        second = RouterServer(RouterConfig(model=model, grpc_port=port, http_port=None))
        with pytest.raises(OSError, match=f"grpc_port {port}: .* 127.0.0.1"):
            await second.start()
        await second.stop(0)
        await first.stop(0)

    run(test)


def test_a_drain_lets_running_streams_end(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            fake_cluster(tmp_path, *pair(token_at, pause=0.05)) as cluster,
            AsyncClient(cluster.router.address, timeout=10) as client,
        ):
            running = asyncio.create_task(client.complete("hello", max_tokens=8))
            await cluster.job("decode-0")
            await cluster.router.stop(5.0)
            assert len((await running).token_ids) == 8
            with pytest.raises(Unavailable):
                await client.complete("hello")

    run(test)


def test_a_router_that_can_not_start_says_why_in_a_line(tmp_path: Path) -> None:
    model, config = model_folder(tmp_path / "model"), tmp_path / "router.json"
    for options, problem in (
        ({"grpc_prt": 1}, "grpc_prt"),
        ({"max_attempts": 0}, "max_attempts is 0; allowed: at least 1"),
        ({"model": str(tmp_path / "nowhere")}, "nowhere"),
    ):
        config.write_text(json.dumps({"model": str(model), "grpc_port": 0, "http_port": None, **options}))
        process = Process("kvrelay.router", ["--config", str(config)], tmp_path / "log", forked=True)
        assert process.popen.wait(TIMEOUT) == 2
        (line,) = process.log.read_text().strip().splitlines()
        assert problem in line
        assert process.popen.stdout is not None
        assert process.popen.stdout.read() == b""
        process.stop()


def test_foreground_process(tmp_path: Path) -> None:
    model, config = model_folder(tmp_path / "model"), tmp_path / "router.json"
    config.write_text(json.dumps({"model": str(model), "grpc_port": 0, "http_port": None}))
    command = [sys.executable, "-m", "kvrelay.router", "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = json.loads(process.stdout.readline())["address"]
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(timeout=TIMEOUT)
        status = HealthStub(channel).Check(HealthCheckRequest(), timeout=TIMEOUT).status
        assert status == HealthCheckResponse.NOT_SERVING
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert all(json.loads(line)["level"] == "info" for line in err.strip().splitlines() if line.startswith("{"))
