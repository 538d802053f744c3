"""Histograms of ended requests by the names of OpenTelemetry's GenAI convention, as Prometheus spells them.

Source: semantic-conventions-genai, "Generative AI model server metrics", status "Development".
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram

from scheduler_service.core.events import CompletionUsage

_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_response_model")
_DURATION_S = tuple(0.01 * 2**i for i in range(14))
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)


class GenAiMetrics:
    """What requests took. Their labels have no adapters, identities or ids.

    `model`: name of the served model; empty until one is.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.model = ""
        self._children: dict[tuple[Histogram, tuple[str, ...]], Histogram] = {}
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Arrival to end of a request that was taken; error_type is empty if it did not fail",
            [*_LABELS, "error_type"],
            buckets=_DURATION_S,
            registry=registry,
        )
        self._first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Arrival to first token of a completion that finished",
            _LABELS,
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self._per_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time per token after the first one of a completion that finished",
            _LABELS,
            buckets=_PER_TOKEN_S,
            registry=registry,
        )

    def ended(
        self, operation: str, error: str, duration_s: float, finished: Iterable[CompletionUsage]
    ) -> None:
        """A request has ended. error: its reason, or empty. finished: its completions, if it began here."""
        labels = (operation, "paceline", self.model)
        self._of(self._duration, *labels, error).observe(duration_s)
        for usage in finished:
            self._of(self._first_token, *labels).observe(usage.first_token_s)
            if usage.completion_tokens > 1:
                took_s = usage.total_s - usage.first_token_s
                self._of(self._per_token, *labels).observe(took_s / (usage.completion_tokens - 1))

    def _of(self, histogram: Histogram, *labels: str) -> Histogram:
        """`Histogram.labels`, which looks for its child under a lock, once for each."""
        child = self._children.get((histogram, labels))
        if child is None:
            child = self._children[histogram, labels] = histogram.labels(*labels)
        return child
