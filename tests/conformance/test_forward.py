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


def test_a_long_inputs_logits_come_in_parts(executor: Executor, draw: Draw, judge: Judge) -> None:
    inputs = [draw.prompt(), draw.prompt()]
    shortest = min(map(len, inputs))
    whole = [forward_logits(executor, tokens) for tokens in inputs]
    for first, count in ((0, 1), (1, 2), (shortest - 1, 1), (2, 0)):
        request = pb.ForwardRequest(outputs=[HIDDEN, EMBEDDING, LOGITS], first_token=first, token_count=count)
        request.inputs.extend(pb.ForwardInput(tokens=tokens) for tokens in inputs)
        for result, expected in zip(executor.call("Forward", request).results, whole, strict=True):
            part = expected[first : first + count if count else None]
            judge.check_same(tensor(result.logits), part)
            assert tensor(result.hidden).shape == (len(part), executor.info.model.hidden_size)
            assert tensor(result.embedding).shape == (executor.info.model.hidden_size,)


@pytest.mark.needs("FORWARD_MASKS")
def test_a_masked_token_is_not_seen(executor: Executor, draw: Draw, judge: Judge) -> None:
    """With position ids that close the gap, it is to the others as if it had not been there."""
    tokens = [*draw.prompt(), *draw.prompt()]
    hidden = len(tokens) // 2
    mask = bytes(place != hidden for place in range(len(tokens)))
    pairs = bytearray(mask * len(tokens))
    pairs[hidden * len(tokens) + hidden] = 1  # for itself
    places = [place - (place > hidden) for place in range(len(tokens))]
    other = [*tokens[:hidden], (tokens[hidden] + 1) % executor.vocab, *tokens[hidden + 1 :]]
    without = forward_logits(executor, tokens[:hidden] + tokens[hidden + 1 :])
    for form in (mask, bytes(pairs)):
        for text in (tokens, other):
            item = pb.ForwardInput(tokens=text, position_ids=places, attention_mask=form)
            (result,) = executor.call("Forward", pb.ForwardRequest(inputs=[item], outputs=[LOGITS])).results
            judge.check_same(np.delete(tensor(result.logits), hidden, 0), without)


@pytest.mark.needs("FORWARD_MASKS")
def test_a_mask_and_positions_that_say_the_default_change_nothing(
    executor: Executor, draw: Draw, judge: Judge
) -> None:
    tokens = draw.prompt()
    ones = b"\1" * len(tokens)
    item = pb.ForwardInput(tokens=tokens, position_ids=range(len(tokens)), attention_mask=ones)
    (result,) = executor.call("Forward", pb.ForwardRequest(inputs=[item], outputs=[LOGITS])).results
    judge.check_same(tensor(result.logits), forward_logits(executor, tokens))


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
        pb.ForwardRequest(inputs=[pb.ForwardInput(tokens=[0])], outputs=[LOGITS], first_token=1),
        pb.ForwardRequest(inputs=[pb.ForwardInput(tokens=[0])], outputs=[LOGITS], token_count=2),
    ]
    for request in cases:
        code = refused(executor.call, "Forward", request)
        assert code is grpc.StatusCode.INVALID_ARGUMENT, str(request)[:80]


def test_masks_and_positions_are_refused_by_name(executor: Executor) -> None:
    offered = pb.CAPABILITY_FORWARD_MASKS in executor.info.capabilities
    expected = grpc.StatusCode.INVALID_ARGUMENT if offered else grpc.StatusCode.UNIMPLEMENTED
    fields: list[dict[str, Any]] = [
        {"position_ids": [0, 1]},
        {"position_ids": [0, 1, executor.info.model.context_length]},
        {"attention_mask": b"\1\1"},
        {"attention_mask": b"\0\1\1"},
    ]
    for one in fields:
        item = pb.ForwardInput(tokens=[0, 0, 0], **one)
        code = refused(executor.call, "Forward", pb.ForwardRequest(inputs=[item], outputs=[EMBEDDING]))
        assert code is expected, str(one)
