"""CLIENT spans of the SDK's calls, by the names of the GenAI convention."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import paceline
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from paceline import errors

from tests.unit.client.conftest import Served

EXPORTED = InMemorySpanExporter()


@pytest.fixture
def provider() -> Iterator[TracerProvider]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTED))
    paceline.trace_calls(provider)
    yield provider
    paceline.stop_tracing_calls()
    EXPORTED.clear()


def only_one() -> tuple[ReadableSpan, dict[str, object]]:
    [span] = EXPORTED.get_finished_spans()
    assert span.kind is SpanKind.CLIENT
    return span, dict(span.attributes or {})


def traceparent(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"


async def test_a_stream_has_a_span_that_its_call_carries(served: Served, provider: TracerProvider) -> None:
    with provider.get_tracer("application").start_as_current_span("outer") as outer:
        stream = served.client.generate(
            messages=[paceline.Message("user", "secret")], max_tokens=9, seed=4, stop=["secret"], model=""
        )
        events = [event async for event in stream]
    finished = EXPORTED.get_finished_spans()
    [span] = [one for one in finished if one.name == "chat"]
    attributes = dict(span.attributes or {})
    assert span.parent == outer.get_span_context()
    assert served.fake.metadata["traceparent"] == traceparent(span)
    end = events[-1]
    assert isinstance(end, paceline.Finished)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.stream"] is True
    assert (attributes["gen_ai.request.max_tokens"], attributes["gen_ai.request.seed"]) == (9, 4)
    assert attributes["gen_ai.usage.output_tokens"] == end.usage.completion_tokens
    assert attributes["gen_ai.response.finish_reasons"] == (end.reason.value,)
    assert "secret" not in str(attributes)


async def test_a_views_traceparent_is_the_parent_and_is_replaced(
    served: Served, provider: TracerProvider
) -> None:
    given = f"00-{'ab' * 16}-{'cd' * 8}-01"
    await served.client.view("", {"traceparent": given}).generate("words").collect()
    span, attributes = only_one()
    assert span.context is not None
    assert span.context.trace_id == int("ab" * 16, 16)
    assert served.fake.metadata["traceparent"] == traceparent(span) != given
    assert attributes["gen_ai.operation.name"] == "text_completion"


async def test_a_failure_is_the_spans_and_an_early_end_is_none(
    served: Served, provider: TracerProvider
) -> None:
    with pytest.raises(errors.RetryLater):
        await served.client.generate("full").collect()
    span, attributes = only_one()
    assert span.status.status_code is StatusCode.ERROR
    assert attributes["error.type"]
    EXPORTED.clear()
    async for _ in (stream := served.client.generate("forever")):
        stream.close()
    span, attributes = only_one()
    assert "error.type" not in attributes


async def test_a_call_whose_time_is_over_before_it_begins_has_a_span_too(
    served: Served, provider: TracerProvider
) -> None:
    with pytest.raises(errors.DeadlineExceeded):
        served.client.generate("words", timeout_s=0)
    _, attributes = only_one()
    assert attributes["error.type"] == "DeadlineExceeded"


async def test_the_blocking_client_has_the_same_spans(served: Served, provider: TracerProvider) -> None:
    def use() -> None:
        with paceline.Client(served.client.addresses) as client:
            client.generate("words").text()
            client.model_info()

    await asyncio.to_thread(use)
    _, attributes = only_one()
    assert attributes["server.address"] == "127.0.0.1"
    assert attributes["gen_ai.response.finish_reasons"]


async def test_calls_have_no_spans_where_they_are_off(served: Served) -> None:
    await served.client.generate("words").collect()
    assert "traceparent" not in served.fake.metadata
    assert not EXPORTED.get_finished_spans()
