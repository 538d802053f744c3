"""Usage, model info, status and metrics have the figures of speculation."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.identity import Identity

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.events import CompletionEnded, CompletionUsage, EndReason
from scheduler_service.core.request import DraftingWish, DraftSource
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.metrics.metrics import Telemetry
from scheduler_service.metrics.rates import Rates
from scheduler_service.model import DraftingOffer, ExecutorView, ServedAdapter, ServiceState
from scheduler_service.rpc.codec.output import output_message
from scheduler_service.rpc.codec.responses import (
    TOKEN_IDS_AT_ONCE,
    executor_list,
    model_info,
    service_status,
    tokenize_response,
)
from scheduler_service.streams.output import OutputEnd
from tests.unit.scheduler_shell.models_made_here import MODEL

USAGE = CompletionUsage(5, 1, 9, 6, 4, 0, 0.1, 0.2, 0.3, 2, (2, 2, 2), (2, 1, 1), 3, 2)
ALL = frozenset(DraftSource)


def test_usage_has_drafts_by_position() -> None:
    end = OutputEnd(0, CompletionEnded("r", 0, EndReason.LENGTH, None, USAGE), None)
    usage = output_message(end).finished.usage
    assert (usage.drafted_tokens, usage.accepted_tokens, usage.verifications) == (6, 4, 2)
    assert (list(usage.drafted_by_position), list(usage.accepted_by_position)) == ([2, 2, 2], [2, 1, 1])
    assert (usage.grammar_drafted_tokens, usage.grammar_accepted_tokens) == (3, 2)


@pytest.mark.parametrize(
    ("default", "expected"),
    [
        (DraftingWish(), pb.Speculation(mode=pb.SPECULATION_MODE_OFF)),
        (DraftingWish(ALL), pb.Speculation(mode=pb.SPECULATION_MODE_AUTO)),
        (DraftingWish(ALL, 3), pb.Speculation(mode=pb.SPECULATION_MODE_FIXED, draft_tokens=3)),
    ],
)
@pytest.mark.parametrize("max_grammar_bytes", [0, 9])
def test_model_info_names_the_drafters_and_the_default_speculation(
    default: DraftingWish, expected: pb.Speculation, max_grammar_bytes: int
) -> None:
    told = model_info(
        replace(MODEL, max_grammar_bytes=max_grammar_bytes, generation_defaults={"temperature": 0.5}),
        max_request_tokens=9,
        has_text=True,
        has_chat_template=False,
        has_directory=True,
        queue=CoreConfig(),
        drafting=DraftingOffer(ALL, default),
        adapters=[ServedAdapter("sql", "p", b"print", 4, 9)],
        caller=Identity("team", "token", max_priority=7, directory=True),
    )
    drafters = [pb.DRAFTER_NGRAM, pb.DRAFTER_DRAFT_EXECUTOR]
    assert list(told.drafters) == drafters + [pb.DRAFTER_GRAMMAR] * (max_grammar_bytes > 0)
    assert told.speculation == expected
    assert told.limits.max_draft_tokens == 16
    assert told.caller == pb.Caller(name="team", max_priority=7, directory=True)
    assert list(told.adapters) == [pb.Adapter(name="sql", fingerprint=b"print", rank=4)]
    assert pb.CAPABILITY_ADAPTERS not in told.capabilities
    assert pb.CAPABILITY_DIRECTORY in told.capabilities
    assert (told.sampling.temperature, told.sampling.top_p, told.sampling.top_k) == (0.5, 1.0, 0)
    assert not told.sampling.HasField("seed")
    assert pb.CAPABILITY_CONTINUATION in told.capabilities
    assert pb.CAPABILITY_CHAT not in told.capabilities


def test_the_list_of_executors_marks_those_that_draft() -> None:
    views = [ExecutorView(at, True, True, "", 1, 1, 0, at == "b", False) for at in "ab"]
    assert [(one.address, one.draft) for one in executor_list(views).executors] == [("a", False), ("b", True)]


@pytest.mark.parametrize("state", list(ServiceState))
def test_status_has_every_state(state: ServiceState) -> None:
    status = service_status(
        state=state,
        uptime_s=1.0,
        ready_executors=1,
        snapshot=StepScheduler(CoreConfig()).snapshot(),
        rates=Rates(0.0),
    )
    assert pb.SchedulerState.Name(status.state) == f"SCHEDULER_STATE_{state.name}"
    assert (status.drafted_tokens, status.accepted_tokens, status.verifications) == (0, 0, 0)


def test_metrics_count_drafts_by_position() -> None:
    metrics = Telemetry()
    for _ in range(2):
        metrics.finished(USAGE)

    def value(name: str, position: int) -> float | None:
        return metrics.registry.get_sample_value(
            f"paceline_scheduler_{name}_by_position_total", {"position": str(position)}
        )

    assert [value("drafted", position) for position in (1, 2, 3, 4)] == [4, 4, 4, None]
    assert [value("accepted", position) for position in (1, 2, 3)] == [4, 2, 2]


def test_many_token_ids_are_encoded_part_by_part() -> None:
    ids = array("I", range(2 * TOKEN_IDS_AT_ONCE + 1))
    parts = list(tokenize_response(ids))
    sizes = [len(pb.TokenizeResponse.FromString(part).token_ids) for part in parts]
    assert sizes == [TOKEN_IDS_AT_ONCE, TOKEN_IDS_AT_ONCE, 1]
    assert pb.TokenizeResponse.FromString(b"".join(parts)) == pb.TokenizeResponse(token_ids=ids)
