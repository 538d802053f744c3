"""Rows.masks and Opening.mask: a row samples what its client allows, position by position."""

import grpc
import numpy as np
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import FULL, Session
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.judge import Judge

pytestmark = pytest.mark.needs("MASKS")

OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT


def mask(vocab: int, *allowed: int) -> bytes:
    """The mask of these tokens."""
    bits = np.zeros(32 * -(-vocab // 32), np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def under(rules: pb.Sampling, vocab: int, *allowed: int) -> pb.Sampling:
    """The rules as the judge reads them: what is not allowed is out of reach."""
    bound = pb.Sampling()
    bound.CopyFrom(rules)
    bound.logit_bias.update(dict.fromkeys(set(range(vocab)) - set(allowed), -1000.0))
    return bound


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_every_token_is_the_best_of_what_its_mask_allows(
    session: Session, draw: Draw, judge: Judge, temperature: float
) -> None:
    vocab = session.executor.vocab
    rules = pb.Sampling(temperature=temperature, seed=draw.seed())
    allowed = [sorted(set(draw.tokens(9))) for _ in range(6)]
    sequence = session.open(draw.prompt(), sampling=rules, mask=mask(vocab, *allowed[0]))
    for tokens in allowed[1:]:
        sequence.feed(masks=mask(vocab, *tokens))
    known = [*sequence.cached, *sequence.pending]
    first = len(known) - len(allowed)
    for place, tokens in enumerate(allowed, start=first):
        assert known[place] in tokens
        judge.check_tokens(known[: place + 1], place, under(rules, vocab, *tokens), first)
    sequence.decode(2)
    judge.check(sequence, outputs=2)


def test_each_position_of_a_verification_has_its_own_mask(session: Session, draw: Draw, judge: Judge) -> None:
    vocab = session.executor.vocab
    sequence = session.open(draw.prompt())
    a, b = draw.tokens(2)
    other = draw.other(b)
    masks = b"".join(mask(vocab, token) for token in (a, other, b))
    reply = sequence.verify([a, b], masks=masks)
    assert reply.tokens == [a, other], "the second draft is not what its mask allows"
    n = sequence.n
    reply = sequence.verify([b, a], masks=b"".join(mask(vocab, token) for token in (b, a, other)))
    assert (reply.tokens, sequence.n) == ([b, a, other], n + 3)
    sequence.decode(2)
    judge.check(sequence, outputs=2)


def test_a_draft_behind_which_nothing_is_allowed_is_not_accepted(session: Session, draw: Draw) -> None:
    vocab = session.executor.vocab
    sequence = session.open(draw.prompt())
    a, b = draw.tokens(2)
    n = sequence.n
    masks = mask(vocab, a) + mask(vocab, b) + mask(vocab)
    assert sequence.verify([a, b], masks=masks).tokens == [a, b]
    assert sequence.n == n + 2


def test_a_mask_is_without_effect_where_nothing_is_sampled(
    session: Session, draw: Draw, judge: Judge
) -> None:
    vocab, prompt = session.executor.vocab, draw.prompt()
    (token,) = draw.tokens(1)
    sequence = session.open(prompt, limit=3, mask=mask(vocab, token))
    assert sequence.emitted == []
    sequence.feed(limit=2, masks=mask(vocab, token))
    assert sequence.emitted == []
    sequence.feed(masks=mask(vocab, token))
    assert sequence.emitted == [token]
    sequence.decode(1)
    judge.check(sequence, outputs=1)


def test_a_mask_binds_its_own_row_alone(session: Session, draw: Draw, judge: Judge) -> None:
    vocab = session.executor.vocab
    sequences = [session.open(draw.short()) for _ in range(3)]
    (token,) = draw.tokens(1)
    rows = [sequence.row() for sequence in sequences]
    rows[1] = sequences[1].row(masks=mask(vocab, token))
    for sequence, row, reply in zip(sequences, rows, session.step(rows).rows, strict=True):
        sequence.took(row, reply)
    assert sequences[1].emitted[-1] == token
    for free in (sequences[0], sequences[2]):
        judge.check(free)


def test_bad_masks_refuse_their_rows_alone(session: Session, draw: Draw, judge: Judge) -> None:
    vocab = session.executor.vocab
    good, full, none = session.open(draw.short()), mask(vocab, *range(vocab)), mask(vocab)
    bad = [session.open(draw.short()) for _ in range(5)]
    rows = [
        good.row(masks=full),
        bad[0].row(masks=full[:-1]),
        bad[1].row(masks=full + full),
        bad[2].row(masks=full, drafts=draw.tokens(1)),
        bad[3].row(masks=none),
        bad[4].row(masks=full, output=FULL),
    ]
    openings = [session.opening(draw.short(), mask=full[1:]), session.opening(draw.short(), mask=none)]
    replies = session.step(rows, openings).rows
    assert [reply.code for reply in replies] == [OK, *[INVALID] * 7]
    assert all("mask" in reply.message for reply in replies[1:])
    good.took(rows[0], replies[0])
    for sequence in bad:
        sequence.decode(1)
        judge.check(sequence)
    judge.check(good)
    if session.executor.can("MULTI_STEP"):
        assert session.step([good.row(masks=full, steps=2)], rpc="BatchDecode").rows[0].code is INVALID
