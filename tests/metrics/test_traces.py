"""Traces of requests, as an OpenTelemetry collector gets them, and the trace's id in the log lines of every process."""

import asyncio
import json
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import grpc
import pytest
from prometheus import values

from kvrelay.router.records.spans import SpanExport
from kvrelay.rpc.tracing import TraceContext
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub
from support.faults import OUT, PROMPT, Scene, prompt_of, scene
from support.http_calls import CHAT, HELLO, fetched
from support.processes import wait_until
from support.router_fakes import fake
from support.scenes import Serve

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter", reason="the extra `otel` is not installed")

from collector import Collector, Received, collecting  # needs the extra

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
SERVER = 2
RETRIED, CORRUPTED = "one", "two"
PORT = {"metrics_port": 0}
LOST = ("lost", "peer_lost")
"""Outcomes of the lost attempt: either the router or the decode worker notices the loss first."""
SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Traced:
    """A cluster that has lost a prefill worker and received a damaged frame."""

    scene: Scene
    spans: list[Received]
    """Spans of the request RETRIED."""
    lines: list[dict[str, Any]]
    """The logs of all processes."""

    def total(self, name: str, **labels: str) -> float:
        """A metric's sum over all processes that serve theirs."""
        status = self.scene.cluster.status()
        addresses = [member.member.metrics_address for member in status.members] + [status.metrics_address]
        return sum(value for address in addresses for value in values(scraped(address), name, labels))


def scraped(address: str) -> str:
    try:
        return fetched(f"http://{address}/metrics")
    except urllib.error.URLError:
        return ""  # the killed one


def below(spans: list[Received], parent: Received) -> list[Received]:
    return [span for span in spans if span.parent == parent.span_id]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """The spans, and the log lines of all processes, of a request whose first prefill worker was killed."""
    rules = [
        f"prefill.after_finish,request={RETRIED},attempt=1:kill",
        f"arrived,index=1,request={CORRUPTED},attempt=1,times=1:corrupt(1)",
    ]
    options = {"otlp_endpoint": collector.endpoint}
    ports = {"worker": PORT, "router": {**options, **PORT}, "supervisor": PORT}
    with scene(tmp_path_factory.mktemp("traced"), rules, losses=True, **ports) as it:
        request = pb.GenerateRequest(
            request_id=RETRIED,
            token_ids=pb.TokenIds(ids=prompt_of(RETRIED)),
            sampling=pb.SamplingParams(max_tokens=OUT, temperature=0.0, ignore_eos=True),
        )
        with grpc.insecure_channel(it.cluster.router) as channel:
            call = InferenceServiceStub(channel).Generate(request, timeout=SECONDS, metadata=[("traceparent", PARENT)])
            messages = list(call)
        assert messages[-1].usage.completion_tokens == OUT
        assert messages[-1].timeline.retries == 1
        spans = collector.trace(TRACE, 14)
        lines = [
            {**line, "process": name}
            for name, process in it.cluster.processes.items()
            for line in map(json.loads, filter(lambda line: line.startswith("{"), process.log.read_text().splitlines()))
        ]
        assert it.ask(CORRUPTED).timeline.retries == 1
        yield Traced(it, spans, lines)


def test_a_request_is_one_trace_with_a_span_for_each_attempt_and_stage(traced: Traced) -> None:
    spans = traced.spans
    (root,) = [span for span in spans if span.parent == SPAN]
    assert (root.name, root.kind, root.failed) == ("text_completion pico", SERVER, False)
    failed, second = below(spans, root)
    assert [span.name for span in (failed, second)] == ["attempt", "attempt"]
    assert failed.failed
    assert failed.attributes["error.type"] in LOST
    assert not second.failed
    assert failed.end <= second.start
    stages = ["router.queue", "placement", "prefill.queue", "prefill", "transfer", "decode.queue", "decode"]
    names = [span.name for span in below(spans, second)]
    assert sorted(names) == sorted(stages)
    assert {"router.queue", "placement", "prefill"} <= {span.name for span in below(spans, failed)}
    for parent in (root, failed, second):
        for span in below(spans, parent):
            assert parent.encloses(span), (parent, span)
    found = {span.name: span for span in below(spans, second)}
    in_order = [found[name] for name in ("router.queue", "placement", "prefill.queue", "prefill")]
    assert all(before.end <= after.start for before, after in pairwise(in_order))
    # The sender's transfer ends when it hears of the commit, which the decode worker doesn't wait for.
    assert found["transfer"].start <= found["decode"].start
    assert found["decode.queue"].end == found["decode"].start


def test_the_attributes_follow_the_conventions(traced: Traced, collector: Collector) -> None:
    spans = traced.spans
    (root,) = [span for span in spans if span.parent == SPAN]
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "pico",
        "gen_ai.request.max_tokens": OUT,
        "gen_ai.usage.input_tokens": PROMPT,
        "gen_ai.usage.output_tokens": OUT,
        "gen_ai.response.finish_reasons": ["length"],
        "kvrelay.retries": 1,
        "kvrelay.class": "default",
    }
    assert {name: root.attributes.get(name) for name in expected} == expected
    assert root.attributes["kvrelay.request"].startswith(RETRIED), "as the logs name it"
    assert 0 < root.attributes["gen_ai.response.time_to_first_chunk"] < SECONDS
    known = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    names = {value for name, value in vars(known).items() if name.startswith("GEN_AI_")}
    assert {name for span in spans for name in span.attributes if name.startswith("gen_ai.")} <= names
    for attempt in below(spans, root):
        workers = attempt.attributes["kvrelay.worker.prefill"], attempt.attributes["kvrelay.worker.decode"]
        for span in below(spans, attempt):
            assert span.attributes.get("kvrelay.worker", workers[0]) in workers
    (transfer,) = [span for span in spans if span.name == "transfer" and "kvrelay.transfer.bytes" in span.attributes]
    assert transfer.attributes["kvrelay.transfer.bytes"] > 0
    assert {"service.name": "kvrelay", "service.instance.id": "router-0"}.items() <= collector.resources[0].items()


def test_every_line_about_the_request_has_its_trace(traced: Traced) -> None:
    lines = traced.lines
    about = [line for line in lines if line.get("request") == "one" or str(line.get("request", "")).startswith("one")]
    messages = {(line["process"], line["message"]) for line in about}
    assert ("router-0", "request ended") in messages
    assert ("router-0", "attempt failed") in messages
    for line in about:
        assert line["trace_id"] == TRACE, line
        assert line["attempt"] in (1, 2), line
        assert line.get("worker") or line.get("prefill"), line


def test_what_went_wrong_is_counted_where_it_was_seen(traced: Traced) -> None:
    total = traced.total
    assert total("kvrelay_transfer_checksum_failures_total", role="decode") == 1
    assert total("kvrelay_transfer_failures_total", role="decode", reason="corrupt") == 1
    assert sum(total("kvrelay_router_attempt_failures_total", reason=reason) for reason in LOST) == 1
    assert total("kvrelay_router_attempt_failures_total") == total("kvrelay_router_retries_total") == 2
    assert total("kvrelay_router_attempts_total") == 4
    assert total("kvrelay_transfer_links_ended_total") >= 1

    def declared() -> bool:
        return total("kvrelay_supervisor_deaths_total", role="prefill") == 1

    wait_until(declared, "the killed worker is declared dead", SECONDS)
    assert total("kvrelay_supervisor_members", role="prefill", state="dead") == 1
    assert total("kvrelay_supervisor_deaths_total") == 1
    assert total("kvrelay_worker_kv_blocks", state="held") == 0


async def test_both_faces_continue_the_callers_trace(serve: Serve, collector: Collector) -> None:
    cluster = await serve(fake("colocated-0"), otlp_endpoint=collector.endpoint)
    http = cluster.http
    parents = {"/v1/completions": f"{1:032x}", "/v1/chat/completions": f"{2:032x}"}
    for path, trace_id in parents.items():
        body = HELLO if path == "/v1/completions" else CHAT
        headers = {"traceparent": f"00-{trace_id}-{SPAN}-01", "tracestate": "vendor=1"}
        assert (await http.post(path, body, headers=headers))[0] == 200
        assert cluster.workers["colocated-0"].jobs[-1].submit.trace_id == trace_id
    refused, ignored = f"{3:032x}", f"{4:032x}"
    headers = {"traceparent": f"00-{refused}-{SPAN}-01"}
    assert (await http.post("/v1/completions", {**HELLO, "max_tokens": -1}, headers=headers))[0] == 400
    headers = {"traceparent": f"00-{ignored}-{SPAN}-00"}
    assert (await http.post("/v1/completions", HELLO, headers=headers))[0] == 200
    assert (await http.post("/v1/completions", {**HELLO, "n": 2}, headers={"traceparent": "nonsense"}))[0] == 200
    begun_here = cluster.workers["colocated-0"].jobs[-1].submit.trace_id
    operations = ("text_completion", "chat")
    for trace_id, operation in zip(parents.values(), operations, strict=True):
        root = (await asyncio.to_thread(collector.trace, trace_id, 3))[0]
        assert (root.parent, root.name.split()[0]) == (SPAN, operation)
        assert root.attributes["gen_ai.operation.name"] == operation
    (span,) = await asyncio.to_thread(collector.trace, refused)
    assert (span.failed, span.attributes["error.type"]) == (True, "invalid")
    assert "max_tokens" in span.why
    root, *others = await asyncio.to_thread(collector.trace, begun_here, 9)
    assert (root.parent, root.attributes["gen_ai.request.choice.count"]) == ("", 2)
    attempts = {span.attributes["kvrelay.completion.index"] for span in others if span.name == "attempt"}
    assert attempts == {0, 1}
    assert ignored not in {span.trace_id for span in collector.spans}, "the caller doesn't record it"


async def test_a_collector_that_is_gone_costs_no_request(serve: Serve) -> None:
    cluster = await serve(fake("colocated-0"), otlp_endpoint="http://127.0.0.1:1")
    for _ in range(20):
        assert (await cluster.http.post("/v1/completions", HELLO))[0] == 200


async def test_a_share_of_the_traces_is_recorded(collector: Collector) -> None:
    export = SpanExport("router-0", collector.endpoint, 0.25)
    contexts = [TraceContext.new() for _ in range(400)]
    for context in contexts:
        export.add(context, 1.0, None, [])
    await export.close()
    recorded = {span.trace_id for span in collector.spans} & {context.trace_id for context in contexts}
    assert 50 <= len(recorded) <= 150
