"""Traces of requests for an OpenTelemetry collector: each request becomes spans when it has ended.

    chat MODEL                                  the call, a child of the caller's span if there is one
        attempt                                 one for each placement of a completion; error if it failed
            router.queue                        waits for workers with capacity
            placement                           workers are chosen and told
            prefill.queue, prefill              on the prefill worker
            transfer                            KV on its way
            decode.queue, decode                on the decode worker

Times are the router's, as `router/records/life.py` says. The attributes follow OpenTelemetry's conventions for
generative AI, and have nothing of a prompt or a completion.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrelay.internal.v1.worker_pb2 import Sampling
from kvrelay.router.records.life import stages
from kvrelay.router.trace import AttemptTrace, RequestTrace
from kvrelay.rpc import log
from kvrelay.rpc.tracing import TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

EXPORT_SECONDS = 5.0
"""Seconds for one message to the collector, which is dropped after that."""
MAX_WAITING = 16384
"""Spans that wait for the collector; further ones are dropped."""
SCHEDULE_SECONDS = 1.0
"""Seconds that spans wait for others before they leave together."""
CLOSE_SECONDS = 2.0
"""Seconds for the last spans to leave when the router ends."""
STAGES = {"queue": "prefill.queue", "decode_queue": "decode.queue"}
"""Names of spans, where a stage of `router/records/life.py` has another one."""
SERVED = ("stop", "length")
Attributes = Mapping[str, str | int | float | bool | Sequence[str]]


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The facts about a call's request that its span shows."""

    model: str
    chat: bool
    sampling: Sampling
    completions: int


class SpanExport:
    """Makes spans of ended requests and sends them in the background. Used on the event loop only."""

    def __init__(
        self,
        router: str,
        endpoint: str,
        share: float,
        clock: Callable[[], float] = time.monotonic,
        exporter: "SpanExporter | None" = None,
    ) -> None:
        """
        Args:
            endpoint: URL of the collector's gRPC.
            share: of the traces that begin here, which are recorded.
            clock: the router's.
            exporter: in place of the one to `endpoint`.

        Raises:
            ValueError: the extra `otel` isn't installed.
        """
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS)
        except ImportError as error:
            raise ValueError(f"otlp_endpoint needs the extra `otel` (pip install 'kvrelay[otel]'): {error}") from None

        class Ids(RandomIdGenerator):
            """Lets a trace that begins here have the id that the log lines have already."""

            trace_id = 0

            def generate_trace_id(self) -> int:
                return self.trace_id

        self._ids, self._clock = Ids(), clock
        resource = Resource.create({"service.name": "kvrelay", "service.instance.id": router})
        sampler = ParentBased(TraceIdRatioBased(share))
        self._provider = TracerProvider(
            sampler=sampler, resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter, MAX_WAITING, SCHEDULE_SECONDS * 1000))
        self._tracer = self._provider.get_tracer("kvrelay.router")
        log.include("opentelemetry")

    async def close(self) -> None:
        """Sends what waits, as far as there is time."""
        # The thread is a daemon, so that no exit waits for an unreachable collector.
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_SECONDS)

    def add(
        self, context: TraceContext, received: float, facts: RequestFacts | None, ended: Sequence[RequestTrace]
    ) -> None:
        """Makes the spans of a call that has ended.

        Args:
            received: when it came, on the monotonic clock.
            facts: None if it failed before that was known.
        """
        from opentelemetry.trace import SpanKind, set_span_in_context

        now = self._clock()
        clock = _Clock(now)
        self._ids.trace_id = int(context.trace_id, 16)
        operation = "chat" if facts is not None and facts.chat else "text_completion"
        root = self._tracer.start_span(
            operation if facts is None else f"{operation} {facts.model}",
            _parent(context),
            SpanKind.SERVER,
            start_time=clock.at(received),
        )
        if not root.is_recording():
            return
        root.set_attributes({"gen_ai.operation.name": operation, "gen_ai.provider.name": "kvrelay"})
        if facts is not None:
            root.set_attributes(_request_attributes(facts))
        root.set_attributes(_ended(ended, received))
        failed = [each for each in ended if each.outcome not in SERVED]
        if failed:
            _fail(root, str(failed[0].outcome), failed[0].failure)
        inside = set_span_in_context(root)
        for each in ended:
            for number, attempt in enumerate(each.tries, 1):
                end = attempt.ended or now
                span = self._tracer.start_span("attempt", inside, start_time=clock.at(attempt.asked))
                span.set_attributes(
                    {
                        "kvrelay.attempt": number,
                        "kvrelay.completion.index": each.index,
                        "kvrelay.worker.prefill": attempt.prefill_worker,
                        "kvrelay.worker.decode": attempt.decode_worker,
                    }
                )
                if attempt.failure:
                    _fail(span, attempt.failure, "")
                self._add_stages(set_span_in_context(span), attempt, end, clock)
                span.end(clock.at(end))
        root.end(clock.at(now))

    def _add_stages(self, parent: Any, attempt: AttemptTrace, end: float, clock: "_Clock") -> None:
        """The spans below that of an attempt, none of which is longer than it."""
        told = attempt.submitted or attempt.placed
        found: list[tuple[str, float, float, Attributes]] = [
            ("router.queue", attempt.asked, attempt.placed, {}),
            ("placement", attempt.placed, told, {"kvrelay.expected_cached_tokens": attempt.expected_tokens}),
        ]
        for stage in stages(attempt, told, end):
            attributes: dict[str, str | int | float] = {"kvrelay.worker": stage.worker}
            if stage.stage == "prefill" and attempt.prefill is not None:
                attributes["gen_ai.usage.cache_read.input_tokens"] = attempt.prefill.cached_tokens
            if stage.stage == "transfer" and attempt.transfer is not None:
                attributes["kvrelay.transfer.bytes"] = attempt.transfer.transfer_bytes
                attributes["kvrelay.transfer.exposed_seconds"] = attempt.transfer.handoff_seconds
            name = STAGES.get(stage.stage, stage.stage)
            found.append((name, stage.start, end if stage.end is None else stage.end, attributes))
        for name, begin, over, given in found:
            begin = min(max(begin, attempt.asked), end)
            span = self._tracer.start_span(name, parent, attributes=given, start_time=clock.at(begin))
            span.end(clock.at(min(max(over, begin), end)))


class _Clock:
    """Converts times of the router's clock to Unix nanoseconds, the same way for all spans of a trace."""

    def __init__(self, now: float) -> None:
        self._offset = time.time_ns() - int(now * 1e9)

    def at(self, moment: float) -> int:
        return int(moment * 1e9) + self._offset


def _parent(context: TraceContext) -> Any:
    """The caller's span as OpenTelemetry's context; an empty one if the trace begins here."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

    if not context.span_id:
        return Context()
    state = TraceState.from_header([context.state]) if context.state else None
    ids = int(context.trace_id, 16), int(context.span_id, 16)
    caller = SpanContext(*ids, is_remote=True, trace_flags=TraceFlags(context.flags), trace_state=state)
    return set_span_in_context(NonRecordingSpan(caller), Context())


def _request_attributes(facts: RequestFacts) -> Attributes:
    sampling = facts.sampling
    attributes: dict[str, str | int | float] = {
        "gen_ai.request.model": facts.model,
        "gen_ai.response.model": facts.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": str(sampling.seed),
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if facts.completions > 1:
        attributes["gen_ai.request.choice.count"] = facts.completions
    return attributes


def _ended(traces: Sequence[RequestTrace], received: float) -> Attributes:
    """Figures of all completions of a call."""
    usages = [trace.usage() for trace in traces]
    attributes: dict[str, str | int | float | Sequence[str]] = {
        "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in usages),
        "gen_ai.usage.output_tokens": sum(usage.completion_tokens for usage in usages),
        "gen_ai.usage.cache_read.input_tokens": sum(usage.cached_tokens for usage in usages),
        "gen_ai.response.finish_reasons": [str(trace.outcome) for trace in traces],
        "kvrelay.retries": sum(trace.retries for trace in traces),
        "kvrelay.migrations": sum(trace.migrations for trace in traces),
    }
    first = min((trace.first_sent for trace in traces if trace.first_sent is not None), default=None)
    if first is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = first - received
    if traces:
        attributes["kvrelay.request"] = traces[0].wire_id
        attributes["kvrelay.class"], attributes["kvrelay.tenant"] = traces[0].service, traces[0].tenant
    return attributes


def _fail(span: "Span", kind: str, why: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, why))
