"""Opening.scored_from: how likely a prompt's own tokens are, whatever the way in which it is computed."""

from collections.abc import Sequence

import grpc
import numpy as np
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import NONE, Executor, Session
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.judge import Judge
from tests.conformance.kit.reply import RowReply
from tests.conformance.kit.sampler import log_softmax

pytestmark = pytest.mark.needs("SCORES")

CLOSE = 1e-3  # of fp32 log-probabilities


def joined(replies: Sequence[RowReply]) -> tuple[int, list[float]]:
    """The position of the first score, and the scores of all rows: each begins where the one before ended."""
    first, logprobs = 0, list[float]()
    for reply in replies:
        if reply.detail.HasField("scores"):
            scores = reply.detail.scores
            first = first or scores.first
            assert scores.first == first + len(logprobs)
            logprobs += scores.logprobs
    return first, logprobs


def check(judge: Judge, tokens: Sequence[int], p: int, *replies: RowReply) -> list[float]:
    """The replies bring the scores of tokens[p:], and no others."""
    expected = log_softmax(judge.logits(tokens, 0))[np.arange(p - 1, len(tokens) - 1), tokens[p:]]
    first, logprobs = joined(replies)
    assert (first, len(logprobs)) == (p, len(tokens) - p)
    assert np.allclose(logprobs, expected, atol=CLOSE), "not the log-softmax of the raw logits"
    return logprobs


@pytest.mark.parametrize("p", [1, 2, 9, -1])
def test_scores_are_of_the_raw_logits(session: Session, draw: Draw, judge: Judge, p: int) -> None:
    """The score of a token comes from the logits after the tokens before it."""
    prompt = draw.prompt()
    p = p % len(prompt)
    rules = pb.Sampling(
        temperature=3, seed=draw.seed(), repetition_penalty=2, presence_penalty=4, logit_bias={0: 50.0}
    )
    sequence = session.open(prompt, sampling=rules, scored_from=p)
    check(judge, prompt, p, sequence.last)
    sequence.decode(2)
    judge.check(sequence)


def test_chunks_bring_their_scores(session: Session, draw: Draw, judge: Judge, executor: Executor) -> None:
    prompt, wholes = draw.prompt(), set()
    for limit in (0, 1, executor.page, executor.page - 1 or 1):
        sequence = session.open(prompt, scored_from=2, limit=limit, output=NONE)
        replies = [sequence.last]
        while sequence.n < len(prompt):
            replies.append(sequence.feed("Prefill", limit=limit, output=NONE))
        wholes.add(tuple(check(judge, prompt, 2, *replies)))
    assert len(wholes) == 1 or not judge.exact


def test_scores_do_not_depend_on_their_neighbours(session: Session, draw: Draw, judge: Judge) -> None:
    prompt = draw.prompt()
    alone = session.open(prompt, scored_from=1)
    others = [session.opening(draw.prompt(), scored_from=3), session.opening(draw.short())]
    beside = session.open_all([*others, session.opening(prompt, scored_from=1)])[-1]
    one, other = (check(judge, prompt, 1, sequence.last) for sequence in (alone, beside))
    assert one == other or not judge.exact


@pytest.mark.needs("PREFIX_CACHE")
def test_a_prefix_hit_loses_no_score(session: Session, draw: Draw, judge: Judge, executor: Executor) -> None:
    """It ends before the token from whose logits the first score comes."""
    prompt, page = draw.prompt(), executor.page
    cold = check(judge, prompt, 1, session.open(prompt, scored_from=1).last)
    for p in (1, page - 1 or 1, page, page + 1, 2 * page, 2 * page + 1, len(prompt) - 1):
        warm = session.open(prompt, scored_from=p)
        assert (p - 1) // page * page <= warm.hit <= p - 1
        found = check(judge, prompt, p, warm.last)
        assert found == cold[p - 1 :] or not judge.exact


@pytest.mark.needs("PREFIX_CACHE")
def test_a_prompt_that_was_only_scored_is_a_hit(session: Session, draw: Draw, executor: Executor) -> None:
    prompt = draw.prompt()
    session.release(session.open(prompt, scored_from=len(prompt) - 1, output=NONE))
    assert session.open(prompt).hit >= (len(prompt) - 1) // executor.page * executor.page


@pytest.mark.parametrize("k", [0, 1, 4])
def test_alternatives_come_with_each_score(session: Session, draw: Draw, judge: Judge, k: int) -> None:
    if k > session.executor.limits.max_logprobs:
        pytest.skip("max_logprobs is smaller")
    prompt = draw.prompt()
    reply = session.open(prompt, scored_from=5, sampling=pb.Sampling(logprobs=k), output=NONE).last
    scores, expected = reply.detail.scores, log_softmax(judge.logits(prompt, 4))[:-1]
    check(judge, prompt, 5, reply)
    assert scores.k == k
    ids = np.array(scores.top_ids, np.int64).reshape(-1, k) if k else np.zeros((len(expected), 0), np.int64)
    found = np.array(scores.top_logprobs).reshape(ids.shape)
    assert ids.shape == (len(prompt) - 5, k)
    assert (np.diff(found) <= 0).all(), "not sorted"
    assert np.allclose(found, np.take_along_axis(expected, ids, 1), atol=CLOSE)
    assert np.allclose(found, -np.sort(-expected)[:, :k], atol=CLOSE), "not the most likely ones"


def test_a_score_is_the_logprob_with_which_the_token_was_sampled(
    session: Session, draw: Draw, judge: Judge
) -> None:
    prompt = draw.prompt()
    rules = pb.Sampling(temperature=1.4, seed=draw.seed(), presence_penalty=2, logprobs=0)
    sequence = session.open(prompt, sampling=rules)
    logprobs = [*sequence.last.logprobs, *(sequence.feed().logprobs[0] for _ in range(3))]
    again = session.open([*prompt, *sequence.emitted], scored_from=len(prompt), sampling=rules, output=NONE)
    _, scores = joined([again.last])
    assert np.allclose(scores, logprobs, atol=0 if judge.exact else CLOSE)


def test_only_the_openings_own_tokens_have_scores(session: Session, draw: Draw) -> None:
    """Not what is sampled after them, nor what is given to a fork or after a truncation."""
    prompt = draw.prompt()
    sequence = session.open(prompt, scored_from=1)
    assert joined([sequence.feed(), sequence.feed()]) == (0, [])
    chunk = session.open(prompt, scored_from=len(prompt) - 1, limit=3, salt=draw.salt(), output=NONE)
    assert joined([chunk.last]) == (0, [])
    chunk.truncate(2)
    assert joined([chunk.feed(tokens=prompt[2:])]) == (0, [])
    if session.executor.can("FORK"):
        copy = session.fork(sequence, 3)
        assert joined([copy.feed(tokens=prompt[3:])]) == (0, [])


@pytest.mark.parametrize("p", ["zero", "the end", "behind it"])
def test_a_position_out_of_range_refuses_its_opening_alone(session: Session, draw: Draw, p: str) -> None:
    prompt = draw.prompt()
    places = {"zero": 0, "the end": len(prompt), "behind it": 2**32 - 1}
    bad = session.opening(prompt, scored_from=places[p])
    reply = session.step(openings=[bad, session.opening(prompt, scored_from=1)])
    assert [row.code for row in reply.rows] == [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OK]
    assert "scored_from" in reply.rows[0].message
