"""The router as a process: health, reflection, limits, refusal of what it can't serve, start and stop."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from kvrelay.client import Unavailable
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD, MEMBER_STATE_READY, MEMBER_STATE_STARTING, ROLE_ROUTER
from kvrelay.internal.v1.worker_pb2 import RelayRequest
from support.router_fakes import FakeWorker, Script, colocated_of, fake, pair, prefill_of, silent, until
from support.scenes import Serve

SERVICE = "kvrelay.v1.InferenceService"
TIMEOUT = 30


async def test_health_says_whether_a_request_can_be_placed(serve: Serve) -> None:
    cluster = await serve(*pair(), worker_wait_seconds=0.0)
    stub = HealthStub(cluster.channel)

    async def wait_for(status: HealthCheckResponse.ServingStatus) -> None:
        for service in ("", SERVICE):
            async with asyncio.timeout(5):
                async for response in stub.Watch(HealthCheckRequest(service=service)):
                    if response.status == status:
                        break

    await wait_for(HealthCheckResponse.SERVING)
    cluster.announce(decode_0=MEMBER_STATE_DEAD)
    await wait_for(HealthCheckResponse.NOT_SERVING)
    with pytest.raises(Unavailable, match="no worker can take the request now"):
        await cluster.client.complete("hello")
    worker = fake("colocated-0")
    await cluster.join(worker, alone=True)
    await wait_for(HealthCheckResponse.SERVING)
    await cluster.ask()
    await worker.stop()
    await wait_for(HealthCheckResponse.NOT_SERVING)


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
async def test_a_router_that_starts_is_ready_when_it_has_dialed_each_worker(serve: Serve, answers: bool) -> None:
    """A decode worker would compute the first prompts itself."""

    prefill = SlowToAnswer("prefill-0", "prefill", prefill_of())
    cluster = await serve()
    await cluster.join(prefill, fake("decode-0"))
    await prefill.dialed.wait()
    await until(lambda: any(view.ready for view in cluster.router.registry.view()), "a worker")
    assert not cluster.router.registry.complete
    if answers:
        prefill.ready.set()
    else:
        await prefill.stop()
    await until(lambda: cluster.router.registry.complete, "the router is ready")


async def test_the_supervisor_gets_the_routers_heartbeats(serve: Serve) -> None:
    cluster = await serve()
    heard = cluster.supervisor.heard
    member = await until(lambda: heard.get("router-0"), "a heartbeat")
    assert (member.role, member.state) == (ROLE_ROUTER, MEMBER_STATE_STARTING)
    assert member.address == cluster.router.address
    with pytest.raises(Unavailable, match="no worker is ready yet"):
        await cluster.client.model_info()
    worker = fake("colocated-0")
    await cluster.join(worker)
    await until(lambda: heard["router-0"].state == MEMBER_STATE_READY, "the router reports that it is ready")
    await worker.stop()
    cluster.supervisor.fenced = True
    cluster.supervisor.announce()
    reason = await asyncio.wait_for(cluster.router.failed(), 5)
    assert "declared dead" in str(reason)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_every_service(serve: Serve, version: str) -> None:
    reflection = f"grpc.reflection.{version}.ServerReflection"
    cluster = await serve(*pair())
    method = cluster.channel.stream_stream(
        f"/{reflection}/ServerReflectionInfo",
        request_serializer=ServerReflectionRequest.SerializeToString,
        response_deserializer=ServerReflectionResponse.FromString,
    )

    async def ask(**request: str) -> ServerReflectionResponse:
        (answer,) = [answer async for answer in method(iter([ServerReflectionRequest(**request)]), timeout=TIMEOUT)]
        return answer

    names = {service.name for service in (await ask(list_services="")).list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health", reflection} <= names
    for name in names:
        described = (await ask(file_containing_symbol=name)).file_descriptor_response.file_descriptor_proto
        files = map(FileDescriptorProto.FromString, described)
        assert name in {f"{file.package}.{service.name}" for file in files for service in file.service}


async def test_a_new_request_waits_for_the_replacement_of_a_lost_worker(serve: Serve) -> None:
    cluster = await serve(*pair())
    cluster.announce(decode_0=MEMBER_STATE_DEAD)
    await until(lambda: not cluster.router.registry.complete, "it is lost")
    waiting = [cluster.asking() for _ in range(20)]
    await asyncio.wait(waiting, timeout=0.2)
    assert not any(task.done() for task in waiting)
    await cluster.join(fake("colocated-0"), alone=True)
    assert not any(completion.timeline.retries for completion in await asyncio.gather(*waiting))


async def test_a_worker_of_another_model_is_not_used(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    ours = fake("colocated-0")
    odd = fake("colocated-1", silent, fingerprint="0" * 64)
    small = fake("colocated-2", max_context=32)
    cluster = await serve(ours)
    await cluster.join(odd, small)
    await until(lambda: odd.streams, "the odd worker was reached")
    await cluster.ready("colocated-0", "colocated-2")
    assert (await cluster.client.model_info()).max_context == 32
    for _ in range(6):
        await cluster.ask()
    assert not odd.jobs
    assert len(ours.jobs) == len(small.jobs) == 3
    # Without the other workers, its model is the cluster's.
    odd.script = colocated_of()
    cluster.supervisor.announce(odd.member())
    await ours.stop()
    await small.stop()
    await cluster.ready("colocated-1")
    await cluster.ask()
    assert any("another model" in record.message and record.worker == "colocated-1" for record in caplog.records)


async def test_a_worker_of_another_model_that_is_reached_first_doesnt_decide(serve: Serve) -> None:
    cluster = await serve(fake("prefill-9", silent, fingerprint="0" * 64))
    await cluster.join(*pair())
    await cluster.ready("prefill-0", "decode-0")
    await cluster.ask()


async def test_a_drain_lets_running_streams_end(serve: Serve) -> None:
    cluster = await serve(*pair(pause=0.05))
    running = cluster.asking()
    await cluster.job("decode-0")
    await cluster.router.stop(5.0)
    await running
    with pytest.raises(Unavailable):
        await cluster.client.complete("hello")
