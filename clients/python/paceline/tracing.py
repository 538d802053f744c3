"""CLIENT spans of calls, by OpenTelemetry's API, which this imports: it comes with the extra otel.

Names are those of the GenAI convention (semantic-conventions-genai, "Development"): inference and embeddings
spans. Stop strings are left out, as all texts are.
"""

from __future__ import annotations

import time
from typing import Any

from google.protobuf.message import Message

from paceline.call_spans import CallSpan, record_calls
from paceline.channel import Metadata
from paceline.errors import PacelineError
from paceline.extras import installation
from paceline.responses import lower_name
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.types import Finished

try:
    from opentelemetry import trace
    from opentelemetry.context import Context, get_current
    from opentelemetry.trace import SpanKind, StatusCode, TracerProvider, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImportError(f"OpenTelemetry is not installed; {installation('otel')}") from error

_PROPAGATOR = TraceContextTextMapPropagator()
_OPERATIONS = {pb.ScoreRequest: "score", pb.EmbedRequest: "embeddings", pb.RerankRequest: "rerank"}
_SAMPLING = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")
_USAGE = {
    "gen_ai.usage.output_tokens": "completion_tokens",
    "gen_ai.usage.reasoning.output_tokens": "reasoning_tokens",
}


def trace_calls(provider: TracerProvider | None = None) -> None:
    """From now on calls that generate or evaluate have CLIENT spans, in all clients of this process.

    provider: of the spans; None: the global one, which the program has set. A span is a child of the current
    one, or of the `traceparent` in a view's metadata, and the scheduler's span is its child. Spans have the
    names of the GenAI convention, and neither prompts nor outputs.
    """
    tracer = trace.get_tracer("paceline", tracer_provider=provider)

    def begin(request: Message, metadata: Metadata) -> CallSpan:
        attributes = _attributes(request)
        carrier = dict(metadata)
        parent = _PROPAGATOR.extract(carrier, Context()) if "traceparent" in carrier else get_current()
        name = f"{attributes['gen_ai.operation.name']} {attributes.get('gen_ai.request.model', '')}".rstrip()
        return _RecordedSpan(tracer.start_span(name, parent, SpanKind.CLIENT, attributes), parent)

    record_calls(begin)


def stop_tracing_calls() -> None:
    """Calls that begin from now on have no spans."""
    record_calls(None)


def _attributes(message: Message) -> dict[str, Any]:
    is_stream = isinstance(message, pb.GenerateRequest)
    request: Any = message.request if isinstance(message, pb.GenerateUnaryRequest) else message
    found: dict[str, Any] = {"gen_ai.provider.name": "paceline"}
    if request.model:
        found["gen_ai.request.model"] = request.model
    if not isinstance(request, pb.GenerateRequest):
        return found | {"gen_ai.operation.name": _OPERATIONS[type(request)]}
    is_chat = request.WhichOneof("prompt") == "messages"
    found["gen_ai.operation.name"] = "chat" if is_chat else "text_completion"
    found["gen_ai.request.stream"] = is_stream
    found["gen_ai.request.choice.count"] = max(request.n, 1)
    if request.stop.HasField("max_tokens"):
        found["gen_ai.request.max_tokens"] = request.stop.max_tokens
    for field, value in request.sampling.ListFields():
        if field.name in _SAMPLING:
            found[f"gen_ai.request.{field.name}"] = value
    return found


class _RecordedSpan(CallSpan):
    def __init__(self, span: trace.Span, parent: Context) -> None:
        self._span, self._parent = span, parent
        self._began = time.monotonic()
        self._has_ended = False
        self._reasons: list[str] = []
        self._counts = dict.fromkeys(_USAGE, 0)
        self._has_chunk = False

    def carried(self, metadata: Metadata, address: str) -> Metadata:
        """Its context takes the place of its parent's."""
        host, _, port = address.rpartition(":")
        self._span.set_attribute("server.address", host.strip("[]") or address)
        if port.isdecimal():
            self._span.set_attribute("server.port", int(port))
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(self._span, self._parent))
        others = (one for one in metadata if one[0] not in ("traceparent", "tracestate"))
        return (*others, *carrier.items())

    def saw(self, found: Any) -> None:
        """Count what it says."""
        if isinstance(found, pb.GenerateUnaryResponse):
            self._span.set_attribute("gen_ai.response.id", found.request_id)
            for one in found.completions:
                reason = lower_name(pb.FinishReason, "FINISH_REASON_", one.finished.reason)
                self._finished(reason, one.finished.usage)
        elif isinstance(found, Finished):
            self._finished(found.reason.value, found.usage)
        elif isinstance(found, pb.ScoreResponse | pb.EmbedResponse | pb.RerankResponse):
            self._input(found.usage)
        elif not self._has_chunk:
            self._has_chunk = True
            took_s = time.monotonic() - self._began
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", took_s)

    def _finished(self, reason: str, usage: Any) -> None:
        self._reasons.append(reason)
        for name, field in _USAGE.items():
            self._counts[name] += getattr(usage, field)
        self._input(usage)

    def _input(self, usage: Any) -> None:
        self._span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)

    def end(self, error: BaseException | None = None) -> None:
        """Its figures are complete."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._reasons:
            self._span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
            self._span.set_attributes(self._counts)
        if error is not None:
            reason = error.reason if isinstance(error, PacelineError) else ""
            self._span.set_attribute("error.type", reason or type(error).__name__)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()
