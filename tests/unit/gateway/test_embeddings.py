"""The gateway's Embed is the public one of one input, with another reply."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from paceline.scheduler.v1 import scheduler_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2 as worker_pb

from scheduler_service.errors import ErrorReason
from scheduler_service.gateway.codec.embeddings import WorkerEmbedTask
from scheduler_service.rpc.codec.adapters import NO_ADAPTERS
from scheduler_service.streams.evaluation import EvaluatedInput
from tests.support.untyped import present
from tests.unit.gateway.test_worker import a_call, worker
from tests.unit.scheduler_shell.bad_ends import raises
from tests.unit.scheduler_shell.models_made_here import LIMITS, MODEL

ABLE = replace(MODEL, embedding_size=2, limits=replace(LIMITS, max_inputs=4))


def request(*ids: int) -> worker_pb.EmbedRequest:
    return worker_pb.EmbedRequest(request_id="r-1", tokenized=worker_pb.TokenizedInput(input_ids=ids))


def test_the_reply_is_the_vector_of_length_1_and_its_prompt_tokens() -> None:
    task = WorkerEmbedTask(request(1, 2, 3), ABLE, NO_ADAPTERS)
    assert task.call.id == "r-1"
    [one] = present(task.evaluation((), 64)).inputs
    assert list(one.tokens) == [1, 2, 3]
    vector = np.array([3, 4], "<f4").tobytes()
    reply = b"".join(task.response([EvaluatedInput(vector=vector)], pb.InputUsage()))
    answer = worker_pb.EmbedResponse.FromString(reply)
    assert list(answer.embedding) == pytest.approx([0.6, 0.8])
    assert (answer.prompt_tokens, answer.embedding_dim) == (3, 2)


@pytest.mark.parametrize(
    ("message", "model", "reason", "complaint"),
    [
        (request(), ABLE, ErrorReason.INVALID_REQUEST, "^input: must not be empty"),
        (request(1, 100), ABLE, ErrorReason.INVALID_REQUEST, r"^input\[1\]: is 100"),
        (request(*[1] * 65), ABLE, ErrorReason.INVALID_REQUEST, "^input: .*65"),
        (request(1), MODEL, ErrorReason.UNSUPPORTED, "gives no vectors"),
    ],
)
async def test_a_refusal_names_the_input(
    message: worker_pb.EmbedRequest, model: Any, reason: ErrorReason, complaint: str
) -> None:
    served = SimpleNamespace(model=model, text=None)
    service: Any = SimpleNamespace(
        served_for_request=lambda caller: served, wanted=NO_ADAPTERS, streams=SimpleNamespace()
    )
    with raises(reason, match=complaint):
        await worker(service).Embed(message, a_call())
