"""An OpenTelemetry collector in this process, which keeps the spans that it gets."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from support.processes import wait_until

SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Received:
    """A span, with its attributes as plain values."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    kind: int
    start: int
    end: int
    failed: bool
    why: str
    attributes: dict[str, Any]

    def encloses(self, other: "Received") -> bool:
        return self.start <= other.start <= other.end <= self.end


class Collector(TraceServiceServicer):
    """Keeps every span."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.resources: list[dict[str, Any]] = []
        self.endpoint = ""

    def Export(self, request: ExportTraceServiceRequest, context: grpc.ServicerContext) -> ExportTraceServiceResponse:
        for group in request.resource_spans:
            self.resources.append(_values(group.resource.attributes))
            for scope in group.scope_spans:
                self.spans += map(_received, scope.spans)
        return ExportTraceServiceResponse()

    def trace(self, trace_id: str, spans: int = 1) -> list[Received]:
        """Waits until a trace has at least so many spans; returns them by their start."""

        def found() -> list[Received]:
            return [span for span in list(self.spans) if span.trace_id == trace_id]

        wait_until(lambda: len(found()) >= spans, lambda: f"{spans} spans: {found()}", SECONDS)
        return sorted(found(), key=lambda span: (span.start, -span.end))


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def _received(span: Span) -> Received:
    return Received(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == Status.STATUS_CODE_ERROR,
        span.status.message,
        _values(span.attributes),
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
