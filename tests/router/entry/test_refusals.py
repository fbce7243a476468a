"""Admission: what is refused before any work is done, with which delay, and what never is."""

import asyncio
import math
from collections.abc import Awaitable, Callable

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from kvrelay.client import Exhausted
from kvrelay.costs.predict import Predicted
from kvrelay.internal.v1.worker_pb2 import Failure, Load, Requests
from kvrelay.router.config import ServiceClass
from kvrelay.v1.inference_pb2 import GenerateRequest, GenerateResponse, Resume, SamplingParams
from support.http_calls import HELLO
from support.router_fakes import FakeCluster, Job, first_attempt, pair, until
from support.scenes import Serve

CLASSES = {"interactive": ServiceClass(ttft_target_seconds=2.0), "quick": ServiceClass(tpot_target_seconds=0.05)}
Start = Callable[..., Awaitable[FakeCluster]]


class Forecast:
    """The policy's predictions."""

    def __init__(self) -> None:
        self.wait, self.compute, self.tpot = 3.0, 0.5, 0.1
        self.known = True

    def predict(self, demand: object, workers: object) -> Predicted | None:
        alone = getattr(demand, "prompt_tokens", 0) == 1
        return Predicted(self.wait + (0.0 if alone else self.compute), self.tpot) if self.known else None


@pytest.fixture
def forecast() -> Forecast:
    return Forecast()


@pytest.fixture
def start(serve: Serve, forecast: Forecast, monkeypatch: pytest.MonkeyPatch) -> Start:
    async def started(admission: str = "predicted", **more: object) -> FakeCluster:
        """A router whose workers have something to do, and whose policy predicts what a test says."""
        cluster = await serve(*pair(), admission=admission, classes=CLASSES, **more)
        policy = cluster.router.front.dispatch.placing.policy
        monkeypatch.setattr(type(policy), "predict", lambda self, demand, workers: forecast.predict(demand, workers))
        await cluster.report("prefill-0", Load(requests=Requests(running=1)))
        return cluster

    return started


def submitted(cluster: FakeCluster) -> int:
    return sum(len(worker.jobs) for worker in cluster.workers.values())


async def test_http_says_429_and_whole_seconds_rounded_up(start: Start, forecast: Forecast) -> None:
    cluster = await start()
    forecast.wait = 3.2
    asked = {**HELLO, "slo_class": "interactive"}
    async with cluster.http.session.post("/v1/completions", json=asked) as response:
        error = (await response.json())["error"]
        assert (response.status, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
        assert response.headers["Retry-After"] == "2", "the targets are met after 1.7 s"
        assert 1690 <= int(response.headers["retry-after-ms"]) <= 1710
    assert "it would have its first token after 3.70 s" in error["message"]
    assert "the targets of the class interactive are 2 s and 0.1 s" in error["message"]
    assert submitted(cluster) == 0
    assert cluster.outcomes == ["exhausted"]
    assert cluster.metric("kvrelay_router_refused_total", **{"class": "interactive"}) == 1
    forecast.wait = 0.5
    assert (await cluster.http.post("/v1/completions", asked))[0] == 200, "the delay has passed"
    assert cluster.metric("kvrelay_router_refused_total") == 1


async def test_grpc_has_retry_info_in_the_details_of_the_status(start: Start) -> None:
    cluster = await start()
    with pytest.raises(Exhausted) as refused:
        await cluster.client.complete("hello", max_tokens=4, slo_class="interactive")
    assert refused.value.retry_after == pytest.approx(1.5, abs=0.01)
    call = cluster.stub.Generate(GenerateRequest(text="hello", slo_class="interactive"))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await anext(aiter(call))
    trailing = dict(error.value.trailing_metadata() or ())
    status = Status.FromString(trailing["grpc-status-details-bin"])
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert status.message == error.value.details()
    info = RetryInfo()
    assert status.details[0].Unpack(info)
    assert info.retry_delay.ToTimedelta().total_seconds() == int(trailing["retry-delay-ms"]) / 1000
    assert submitted(cluster) == 0


@pytest.mark.parametrize(
    ("admission", "service", "served"),
    [
        ("predicted", "", True),
        ("predicted", "default", True),
        ("predicted", "batch", True),
        ("predicted", "interactive", False),
        ("predicted", "quick", False),
        ("room", "interactive", True),
        ("none", "interactive", True),
    ],
)
async def test_only_missed_targets_are_refused_and_only_where_that_is_asked_for(
    start: Start, admission: str, service: str, served: bool
) -> None:
    cluster = await start(admission)
    if served:
        await cluster.ask(slo_class=service)
    else:
        with pytest.raises(Exhausted, match=f"the targets of the class {service} are"):
            await cluster.ask(slo_class=service)


async def test_what_is_unknown_or_alone_is_served(start: Start, forecast: Forecast) -> None:
    cluster = await start()
    forecast.known = False
    await cluster.ask(slo_class="interactive")
    forecast.known = True
    await cluster.report("prefill-0", Load())
    await cluster.ask(slo_class="interactive")


async def test_a_request_whose_prefill_has_begun_is_never_refused(start: Start, forecast: Forecast) -> None:
    """The worker fails the request, and by then nothing could meet a target any more."""
    cluster = await start()
    forecast.wait = 0.0

    async def fails(job: Job) -> None:
        forecast.wait = 1000.0
        job.fail(Failure.CODE_RETRY)

    cluster.workers["prefill-0"].script = first_attempt(fails)
    await cluster.ask(slo_class="interactive")
    assert [record.attempts for record in cluster.records] == [2]


async def test_neither_a_call_that_continues_a_request_nor_a_later_completion_is_refused(
    start: Start, forecast: Forecast
) -> None:
    cluster = await start()
    request = GenerateRequest(
        text="hello",
        slo_class="interactive",
        sampling=SamplingParams(max_tokens=4, temperature=0),
        resume=Resume(key=bytes(16), call=2),
    )
    responses: list[GenerateResponse] = [response async for response in cluster.stub.Generate(request)]
    assert sum(len(response.token_ids) for response in responses) == 4
    forecast.wait = 0.0

    async def begins(job: Job) -> None:
        forecast.wait = 1000.0
        await first(job)

    first = cluster.workers["prefill-0"].script
    cluster.workers["prefill-0"].script = begins
    body = {**HELLO, "n": 3, "slo_class": "interactive"}
    status, answer = await cluster.http.post("/v1/completions", body)
    assert (status, len(answer["choices"])) == (200, 3)


async def test_what_waits_until_its_target_can_not_be_met_is_refused_before_any_work(
    start: Start, forecast: Forecast
) -> None:
    """It was thought to be in time, but no place came: with half a second of computing, until 1.5 s after it came."""
    cluster = await start(prefill_ahead_tokens=1)
    forecast.wait = 0.0
    await cluster.report("prefill-0", Load(pending_tokens=100, requests=Requests(running=1)))
    began = asyncio.get_running_loop().time()
    patient = cluster.asking(slo_class="batch")
    with pytest.raises(Exhausted, match="the targets of the class interactive"):
        await cluster.ask(slo_class="interactive")
    assert asyncio.get_running_loop().time() - began >= 1.4
    assert submitted(cluster) == 0
    await cluster.report("prefill-0", Load())
    await patient


async def test_room_says_by_the_same_predictions_when_there_is_some(start: Start, forecast: Forecast) -> None:
    """Three wait that take 4 s each, on one worker. Nothing has ended yet, by which a rate would tell it."""
    cluster = await start("room", prefill_ahead_tokens=1, max_queue=3)
    forecast.compute = 4.0
    await cluster.report("prefill-0", Load(pending_tokens=100, requests=Requests(running=1)))
    waiting = [cluster.asking() for _ in range(3)]
    await until(lambda: cluster.router.waiting == 3, "all wait")
    with pytest.raises(Exhausted, match="max_queue") as refused:
        await cluster.ask()
    assert refused.value.retry_after == pytest.approx(3 * 4.0, rel=0.4)
    await cluster.report("prefill-0", Load())
    await asyncio.gather(*waiting)


async def test_without_admission_more_wait_than_max_queue(start: Start) -> None:
    cluster = await start("none", prefill_ahead_tokens=1, max_queue=1)
    await cluster.report("prefill-0", Load(pending_tokens=100, requests=Requests(running=1)))
    waiting = [cluster.asking() for _ in range(5)]
    await until(lambda: cluster.router.waiting == 5, "all wait")
    await cluster.report("prefill-0", Load())
    assert len(await asyncio.gather(*waiting)) == 5
    assert math.isclose(cluster.metric("kvrelay_router_refused_total"), 0.0)
