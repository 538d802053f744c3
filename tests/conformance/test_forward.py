"""Forward: whole inputs, no cache, and the same model as everywhere else."""

from typing import Any, cast

import grpc
import numpy as np
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import FULL, Executor, Session
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.expect import refused
from tests.conformance.kit.judge import Judge, forward_logits
from tests.conformance.kit.reply import tensor

pytestmark = pytest.mark.needs("FORWARD")

HIDDEN, EMBEDDING, LOGITS = pb.FORWARD_OUTPUT_HIDDEN, pb.FORWARD_OUTPUT_EMBEDDING, pb.FORWARD_OUTPUT_LOGITS


def forward(
    executor: Executor, inputs: list[list[int]], *outputs: pb.ForwardOutput.ValueType
) -> list[pb.ForwardResult]:
    request = pb.ForwardRequest(inputs=[pb.ForwardInput(tokens=tokens) for tokens in inputs], outputs=outputs)
    return list(executor.call("Forward", request).results)


@pytest.mark.needs("FULL_LOGITS")
def test_its_logits_are_those_of_a_cold_prefill(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    """The check that the kit's judge rests on, so here every position is compared."""
    prompt = draw.prompt()
    expected = forward_logits(executor, prompt)
    assert expected.shape == (len(prompt), executor.vocab)
    cached = session.open(prompt[:1], output=FULL)
    rows = [cached.last.logits]
    rows += [cached.feed(tokens=[token], output=FULL).logits for token in prompt[1:]]
    judge.check_same(np.concatenate(rows), expected)
    judge.check_same(session.open(prompt, output=FULL).last.logits, expected[-1:])


def test_inputs_do_not_see_each_other(executor: Executor, draw: Draw, judge: Judge) -> None:
    inputs = [draw.prompt(), draw.short(), draw.tokens(1)]
    together = forward(executor, inputs, LOGITS)
    assert len(together) == 3
    for tokens, result in zip(inputs, together, strict=True):
        judge.check_same(tensor(result.logits), forward_logits(executor, tokens))


def test_it_is_causal(executor: Executor, draw: Draw, judge: Judge) -> None:
    tokens = draw.prompt()
    half = len(tokens) // 2
    judge.check_same(forward_logits(executor, tokens)[:half], forward_logits(executor, tokens[:half]))


def test_the_embedding_is_the_mean_hidden_state_of_length_one(executor: Executor, draw: Draw) -> None:
    tokens, hidden_size = draw.prompt(), executor.info.model.hidden_size
    result = forward(executor, [tokens], HIDDEN, EMBEDDING)[0]
    hidden, embedding = tensor(result.hidden), tensor(result.embedding)
    assert hidden.shape == (len(tokens), hidden_size)
    assert embedding.shape == (hidden_size,)
    assert not result.HasField("logits")
    mean = hidden.astype(np.float64).mean(axis=0)
    assert np.allclose(embedding, mean / np.linalg.norm(mean), atol=1e-4)


def test_it_touches_no_cache(executor: Executor, session: Session, draw: Draw, judge: Judge) -> None:
    sequence = session.open(draw.prompt())
    before = executor.status().cache
    forward(executor, [draw.prompt()], HIDDEN, LOGITS)
    assert executor.status().cache == before
    sequence.decode(2)
    judge.check(sequence)


def test_bad_inputs_are_refused(executor: Executor, draw: Draw) -> None:
    vocab, context = executor.vocab, executor.info.model.context_length
    cases = [
        pb.ForwardRequest(outputs=[LOGITS]),
        pb.ForwardRequest(inputs=[pb.ForwardInput()], outputs=[LOGITS]),
        pb.ForwardRequest(inputs=[pb.ForwardInput(tokens=[0])]),
        pb.ForwardRequest(inputs=[pb.ForwardInput(tokens=[0])], outputs=[cast(Any, 99)]),
        pb.ForwardRequest(inputs=[pb.ForwardInput(tokens=[vocab])], outputs=[EMBEDDING]),
        pb.ForwardRequest(inputs=[pb.ForwardInput(tokens=[2**32 - 1])], outputs=[EMBEDDING]),
        pb.ForwardRequest(inputs=[pb.ForwardInput(tokens=[0] * (context + 1))], outputs=[EMBEDDING]),
    ]
    for request in cases:
        code = refused(executor.call, "Forward", request)
        assert code is grpc.StatusCode.INVALID_ARGUMENT, str(request)[:80]
