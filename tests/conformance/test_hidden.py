"""OUTPUT_MODE_HIDDEN: one vector of a prompt, whatever the way in which it is computed."""

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import NONE, Executor, Row, Session
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.judge import Judge
from tests.conformance.kit.reply import tensor

pytestmark = pytest.mark.needs("POOLING", "FORWARD")

HIDDEN, INVALID = pb.OUTPUT_MODE_HIDDEN, grpc.StatusCode.INVALID_ARGUMENT
LAST, MEAN = pb.POOLING_LAST, pb.POOLING_MEAN
CLOSE = 1e-4


def states(executor: Executor, tokens: list[int]) -> NDArray[np.float32]:
    """The hidden states of all tokens, by Forward."""
    request = pb.ForwardRequest(inputs=[pb.ForwardInput(tokens=tokens)], outputs=[pb.FORWARD_OUTPUT_HIDDEN])
    return tensor(executor.call("Forward", request).results[0].hidden)


def pooled(executor: Executor, tokens: list[int], pooling: pb.Pooling.ValueType) -> NDArray[np.float32]:
    of_all = states(executor, tokens)
    mean: NDArray[np.float32] = of_all.mean(0)
    return mean if pooling == MEAN else of_all[-1]


@pytest.mark.parametrize("pooling", [LAST, MEAN])
def test_the_vector_is_that_of_forward(
    session: Session, draw: Draw, executor: Executor, pooling: pb.Pooling.ValueType
) -> None:
    for prompt in (draw.tokens(1), draw.prompt()):
        sequence = session.open(prompt, output=HIDDEN, pooling=pooling)
        hidden = tensor(sequence.last.detail.hidden)
        assert hidden.shape == (executor.info.model.hidden_size,)
        assert np.allclose(hidden, pooled(executor, prompt, pooling), atol=CLOSE)
        assert (sequence.n, sequence.emitted) == (len(prompt), [])


@pytest.mark.parametrize("pooling", [LAST, MEAN])
def test_chunks_make_no_difference(
    session: Session, draw: Draw, executor: Executor, judge: Judge, pooling: pb.Pooling.ValueType
) -> None:
    prompt, wholes = draw.prompt(), set()
    for limit in (1, executor.page - 1 or 1, executor.page, 0):
        sequence = session.open(prompt, output=HIDDEN, pooling=pooling, limit=limit)
        while sequence.n < len(prompt):
            assert not sequence.last.detail.HasField("hidden"), "before the prompt's end"
            sequence.feed("Prefill", limit=limit, output=HIDDEN)
        hidden = tensor(sequence.last.detail.hidden)
        assert np.allclose(hidden, pooled(executor, prompt, pooling), atol=CLOSE)
        wholes.add(hidden.tobytes())
    assert len(wholes) == 1 or not judge.exact


def test_a_mean_is_of_cached_tokens_too(session: Session, draw: Draw, executor: Executor) -> None:
    prompt = draw.prompt()
    session.open(prompt)
    mean, last = (session.open(prompt, output=HIDDEN, pooling=pooling) for pooling in (MEAN, LAST))
    for sequence, pooling in ((mean, MEAN), (last, LAST)):
        hidden = tensor(sequence.last.detail.hidden)
        assert np.allclose(hidden, pooled(executor, prompt, pooling), atol=CLOSE)
    assert mean.hit == 0
    assert last.hit > 0 or not executor.can("PREFIX_CACHE")


def test_vectors_ride_beside_other_rows(
    session: Session, draw: Draw, executor: Executor, judge: Judge
) -> None:
    running, prompts = session.open(draw.prompt()), [draw.prompt(), draw.short()]
    openings = [session.opening(p, output=HIDDEN, pooling=MEAN) for p in prompts]
    row = running.row()
    reply = session.step([row], openings=[*openings, session.opening(draw.prompt())])
    running.took(row, reply.rows[0])
    for prompt, answer in zip(prompts, reply.rows[1:], strict=False):
        assert np.allclose(tensor(answer.detail.hidden), pooled(executor, prompt, MEAN), atol=CLOSE)
    running.decode(1)
    judge.check(running)


def test_behind_the_prompt_it_is_the_state_of_the_last_token(
    session: Session, draw: Draw, executor: Executor
) -> None:
    sequence = session.open(draw.prompt())
    reply = sequence.feed(output=HIDDEN)
    assert reply.tokens == []
    assert np.allclose(tensor(reply.detail.hidden), states(executor, sequence.cached)[-1], atol=CLOSE)
    reply = sequence.feed(tokens=draw.tokens(3), output=HIDDEN)
    assert np.allclose(tensor(reply.detail.hidden), states(executor, sequence.cached)[-1], atol=CLOSE)


def test_a_mean_that_is_not_known_is_refused(session: Session, draw: Draw) -> None:
    prompt = draw.prompt()
    done = session.open(prompt, output=HIDDEN, pooling=MEAN)
    cut = session.open(prompt, output=HIDDEN, pooling=MEAN, limit=5)
    cut.truncate(3)
    rows = [done.row(tokens=[1], output=HIDDEN), cut.row(tokens=prompt[3:], output=HIDDEN)]
    reply = session.step(rows)
    assert [row.code for row in reply.rows] == [INVALID, INVALID]
    assert all("rows.outputs" in row.message for row in reply.rows)
    cut.feed(tokens=prompt[3:], output=NONE)


def test_what_makes_no_sense_refuses_its_row_alone(session: Session, draw: Draw, executor: Executor) -> None:
    prompt = draw.prompt()
    sequence = session.open(prompt)
    openings = [
        session.opening(prompt, pooling=MEAN),
        session.opening(prompt, pooling=77, output=HIDDEN),
        session.opening(prompt, output=HIDDEN),
    ]
    rows: list[Row] = [sequence.row(drafts=draw.tokens(1), output=HIDDEN)] if executor.can("VERIFY") else []
    codes = [row.code for row in session.step(rows, openings=openings).rows]
    assert codes == [INVALID] * (len(rows) + 2) + [grpc.StatusCode.OK]
