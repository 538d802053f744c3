"""Output modes: what a row brings back agrees with the logits that FULL brings back."""

import grpc
import numpy as np
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import FULL, NONE, TOP_K, Session
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.judge import Judge
from tests.conformance.kit.reply import RowReply
from tests.conformance.kit.sampler import log_softmax

CLOSE = 1e-3  # of fp32 log-probabilities


def check_top(reply: RowReply, k: int, logits: np.ndarray) -> None:
    """`reply` names the k best of each row of `logits` [outputs, vocabulary], best first."""
    expected = log_softmax(logits)
    assert reply.top_ids.shape == (len(logits), k)
    for ids, logprobs, row in zip(reply.top_ids, reply.top_logprobs, expected, strict=True):
        assert len(set(ids.tolist())) == k
        assert (np.diff(logprobs) <= 0).all(), "not sorted"
        assert np.allclose(logprobs, row[ids], atol=CLOSE), "not the log-softmax of the raw logits"
        assert np.allclose(logprobs, np.sort(row)[::-1][:k], atol=CLOSE), "not the most likely ones"


@pytest.mark.needs("FULL_LOGITS")
def test_full_logits_are_those_of_the_judge(session: Session, draw: Draw, judge: Judge) -> None:
    prompt = draw.prompt()
    sequence = session.open(prompt, output=FULL)
    assert sequence.last.logits.shape == (1, session.executor.vocab)
    judge.check_same(sequence.last.logits, judge.logits(prompt, len(prompt) - 1))
    token = draw.tokens(1)
    reply = sequence.feed(tokens=token, output=FULL)
    judge.check_same(reply.logits, judge.logits(prompt + token, len(prompt)))


@pytest.mark.needs("FULL_LOGITS")
def test_full_logits_are_raw(session: Session, draw: Draw, judge: Judge) -> None:
    """Penalties, bias and temperature are the sampler's, not the logits'."""
    prompt = draw.prompt()
    rules = pb.Sampling(temperature=3, repetition_penalty=2, presence_penalty=4, logit_bias={0: 50.0})
    sequence = session.open(prompt, sampling=rules, output=FULL)
    judge.check_same(sequence.last.logits, judge.logits(prompt, len(prompt) - 1))


@pytest.mark.needs("FULL_LOGITS")
def test_greedy_is_the_lowest_argmax_of_full(session: Session, draw: Draw, judge: Judge) -> None:
    prompt = draw.prompt()
    logits = session.open(prompt, output=FULL).last.logits[0]
    token = session.open(prompt).emitted[0]
    if judge.exact:
        assert token == int(logits.argmax())
    assert logits[token] >= logits.max() - CLOSE


@pytest.mark.needs("FULL_LOGITS")
def test_of_equal_logits_the_lowest_id_wins(session: Session, draw: Draw) -> None:
    """Bias makes the tie: every id but two is pushed down by the same, and those two are set level."""
    prompt = draw.prompt()
    limit = min(session.executor.limits.max_logit_bias, 64)
    logits = session.open(prompt, output=FULL).last.logits[0]
    ids = draw.tokens(2)
    low, high = min(ids), max(ids)
    if low == high or limit < 2:
        return
    # Sums of fp32 round; a difference that is itself exact in fp32 makes them meet exactly.
    gap = np.float32(logits[low]) - np.float32(logits[high])
    bias = {low: 512.0, high: float(np.float32(512.0) + gap)}
    level = np.float32(logits[low]) + np.float32(bias[low]) == np.float32(logits[high]) + np.float32(
        bias[high]
    )
    token = session.open(prompt, sampling=pb.Sampling(logit_bias=bias)).emitted[0]
    assert token == low if level else token in (low, high)


@pytest.mark.needs("TOP_K")
@pytest.mark.parametrize("wanted", [1, 5])
def test_top_k_is_sorted_and_true(session: Session, draw: Draw, judge: Judge, wanted: int) -> None:
    limits = session.executor.limits
    k = min(wanted, limits.max_logprobs, session.executor.vocab)
    prompt = draw.prompt()
    sequence = session.open(prompt, output=TOP_K, top_k=k)
    assert sequence.emitted == []
    check_top(sequence.last, k, judge.logits(prompt, len(prompt) - 1))
    token = draw.tokens(1)
    reply = sequence.feed(tokens=token, output=TOP_K, top_k=k)
    assert reply.tokens == []
    check_top(reply, k, judge.logits(prompt + token, len(prompt)))


@pytest.mark.needs("TOP_K", "VERIFY")
def test_top_k_of_every_draft_position(session: Session, draw: Draw, judge: Judge) -> None:
    sequence = session.open(draw.prompt())
    drafts, n = draw.tokens(3), sequence.n
    known = [*sequence.cached, *sequence.pending, *drafts]
    reply = sequence.verify(drafts, output=TOP_K, top_k=1)
    assert sequence.n == n + 4, "nothing is accepted and nothing rolled back"
    check_top(reply, 1, judge.logits(known, n))


def test_none_brings_nothing_back(session: Session, draw: Draw) -> None:
    sequence = session.open(draw.prompt())
    n = sequence.n
    reply = sequence.feed(output=NONE)
    assert (sequence.n, reply.tokens, reply.detail) == (n + 1, [], pb.RowDetail())


@pytest.mark.parametrize("k", [0, 3])
def test_logprobs_are_of_the_raw_logits(session: Session, draw: Draw, judge: Judge, k: int) -> None:
    if k > session.executor.limits.max_logprobs:
        pytest.skip("max_logprobs is smaller")
    rules = pb.Sampling(temperature=1.4, seed=draw.seed(), presence_penalty=2, logprobs=k)
    sequence = session.open(draw.prompt(), sampling=rules)
    replies = [sequence.last, *(sequence.feed() for _ in range(4))]
    first = len(sequence.cached) + 1 - len(replies)
    logits = judge.logits(sequence.cached, first - 1)
    expected = log_softmax(logits)
    for reply, row, raw in zip(replies, expected, logits, strict=True):
        assert len(reply.logprobs) == 1
        assert abs(reply.logprobs[0] - row[reply.tokens[0]]) < CLOSE
        if k:
            check_top(reply, k, raw[None])
        else:
            assert reply.detail.k == 0
    judge.check(sequence)


@pytest.mark.needs("VERIFY")
def test_logprobs_of_a_verify_row_are_one_per_emitted_token(
    session: Session, draw: Draw, judge: Judge
) -> None:
    if session.executor.limits.max_logprobs < 2:
        pytest.skip("max_logprobs is smaller")
    rules = pb.Sampling(logprobs=2)
    sequence = session.open(draw.prompt(), sampling=rules)
    n = sequence.n
    scout = session.open([*sequence.cached, *sequence.pending])
    drafts = [scout.emitted[0], draw.other(scout.decode(1)[0]), 0]
    reply = sequence.verify(drafts)
    expected = log_softmax(judge.logits(sequence.cached, n))
    assert len(reply.logprobs) == len(reply.tokens)
    assert np.allclose(reply.logprobs, expected[range(len(reply.tokens)), reply.tokens], atol=CLOSE)
    assert reply.top_ids.shape == (len(reply.tokens), 2)


@pytest.mark.needs("MULTI_STEP")
def test_logprobs_of_several_steps(session: Session, draw: Draw, judge: Judge) -> None:
    if session.executor.limits.max_logprobs < 1:
        pytest.skip("max_logprobs is smaller")
    sequence = session.open(draw.prompt(), sampling=pb.Sampling(logprobs=1))
    n = sequence.n
    reply = sequence.feed("BatchDecode", steps=4)
    logits = judge.logits(sequence.cached, n)
    assert np.allclose(reply.logprobs, log_softmax(logits)[range(4), reply.tokens], atol=CLOSE)
    check_top(reply, 1, logits)


@pytest.mark.parametrize("output", [TOP_K, FULL])
def test_what_is_not_advertised_is_unimplemented(
    session: Session, draw: Draw, output: pb.OutputMode.ValueType
) -> None:
    name = {TOP_K: "TOP_K", FULL: "FULL_LOGITS"}[output]
    opening = session.opening(draw.prompt(), output=output, top_k=1)
    code = session.step(openings=[opening]).rows[0].code
    assert code is (grpc.StatusCode.OK if session.executor.can(name) else grpc.StatusCode.UNIMPLEMENTED)
