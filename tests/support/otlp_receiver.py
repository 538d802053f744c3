"""Receives spans by OTLP over gRPC, as a collector does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc


@dataclass(frozen=True)
class SeenSpan:
    """One span, with times in seconds since 1970."""

    service: str
    name: str
    kind: str  # SERVER, CLIENT, INTERNAL
    trace: str
    id: str
    parent: str
    began: float
    ended: float
    status: int  # 2: error
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...] = ()  # trace and span

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def waited(self) -> float:
        """Of all reasons."""
        return float(sum(self.attributes.get("paceline.wait.seconds", ())))


@dataclass
class Receiver(rpc.TraceServiceServicer):
    """All that has come."""

    address: str = ""
    spans: list[SeenSpan] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def Export(  # noqa: N802
        self, request: pb.ExportTraceServiceRequest, context: Any
    ) -> pb.ExportTraceServiceResponse:
        found = [
            _seen(dict(_attributes(part.resource.attributes))["service.name"], span)
            for part in request.resource_spans
            for scope in part.scope_spans
            for span in scope.spans
        ]
        with self.changed:
            self.spans += found
            self.changed.notify_all()
        return pb.ExportTraceServiceResponse()

    def wait(self, enough: Callable[[list[SeenSpan]], bool], timeout_s: float = 60.0) -> list[SeenSpan]:
        """All spans, when there are enough."""
        with self.changed:
            assert self.changed.wait_for(lambda: enough(self.spans), timeout_s), self.spans
            return list(self.spans)


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """A receiver on loopback."""
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(4))
    rpc.add_TraceServiceServicer_to_server(receiver, server)
    receiver.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait()


def _seen(service: str, span: Any) -> SeenSpan:
    return SeenSpan(
        service,
        span.name,
        type(span).SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        1e-9 * span.start_time_unix_nano,
        1e-9 * span.end_time_unix_nano,
        span.status.code,
        dict(_attributes(span.attributes)),
        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
    )


def _attributes(pairs: Any) -> Iterator[tuple[str, Any]]:
    for pair in pairs:
        yield pair.key, _value(pair.value)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
