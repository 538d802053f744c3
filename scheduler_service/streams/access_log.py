"""The access log: one line at the end of each admitted request, at info. It has no text and no token ids,
but the labels that the client gave. The request's span gets the same figures, without the labels.

Requests that are refused are logged by `service_kit.audit`, at a bounded rate.
"""

from __future__ import annotations

from collections.abc import Iterable

from service_kit.logs import Log

from scheduler_service.core.events import EndReason
from scheduler_service.streams.completion import CompletionBuffer
from scheduler_service.streams.evaluation import EvaluationStream
from scheduler_service.streams.stream import RequestStream

log = Log(__name__)

CLIENT_LEFT = "CLIENT_LEFT"
_REASONS = {
    EndReason.EOS: "STOP",
    EndReason.STOP_TOKEN: "STOP",
    EndReason.STOP_STRING: "STOP",
    EndReason.LENGTH: "LENGTH",
    EndReason.EVALUATED: "EVALUATED",
}
"""As clients see it."""


def log_end(stream: RequestStream | EvaluationStream, now: float, *, client_left: bool) -> None:
    """Log the end of a request. `now`: in seconds on the registry's clock."""
    completions = stream.completions if isinstance(stream, RequestStream) else []
    reason = CLIENT_LEFT if client_left else _reason(stream, completions)
    tokens = sum(one.tokens for one in completions)
    if stream.call is not None:
        stream.call.attributes |= {
            "gen_ai.operation.name": stream.operation,
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.id": stream.request_id,
            "gen_ai.usage.input_tokens": stream.prompt_tokens,
            "gen_ai.usage.output_tokens": tokens,
            "gen_ai.usage.cache_read.input_tokens": stream.cached_tokens,
            "gen_ai.latency.e2e": now - stream.arrival,
        }
        if stream.ended and stream.error is None:
            stream.call.attributes["gen_ai.response.finish_reasons"] = reason.split(",")
    log.info(
        "request ended",
        method=stream.method,
        request_id=stream.request_id,
        identity=stream.identity,
        model=stream.model,
        prompt_tokens=stream.prompt_tokens,
        cached_tokens=stream.cached_tokens,
        completion_tokens=tokens,
        reason=reason,
        ms=round(1000 * (now - stream.arrival)),
        **({"labels": stream.labels} if stream.labels else {}),
    )


def _reason(stream: RequestStream | EvaluationStream, completions: Iterable[CompletionBuffer]) -> str:
    """The error's reason; without one, why the completions ended, each reason once."""
    if stream.error is not None:
        return stream.error.reason.name
    if isinstance(stream, EvaluationStream):
        return _REASONS[EndReason.EVALUATED]
    return ",".join(sorted({_REASONS[one.finished.reason] for one in completions if one.finished}))
