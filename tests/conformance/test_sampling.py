"""Sampling: every rule, with the proto's own noise, and independent of how a token was computed."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit import noise
from tests.conformance.kit.client import Session, decode_together
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.judge import Judge

RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.3},
    "hottest": {"temperature": 100.0},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k of one": {"temperature": 1.0, "top_k": 1},
    "top_k beyond the vocabulary": {"temperature": 1.0, "top_k": 2**32 - 1},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "tiny top_p": {"temperature": 1.0, "top_p": 1e-6},
    "min_p": {"temperature": 1.0, "min_p": 0.3},
    "min_p of one": {"temperature": 1.0, "min_p": 1.0},
    "hot nucleus": {"temperature": 2.5, "top_p": 0.5},
    "cold nucleus": {"temperature": 0.4, "top_p": 0.97},
    "hot min_p": {"temperature": 2.5, "min_p": 0.4},
    "top_p of what top_k left": {"temperature": 1.5, "top_k": 8, "top_p": 0.6},
    "min_p of what top_p left": {"temperature": 1.5, "top_p": 0.7, "min_p": 0.5},
    "all filters": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"temperature": 1.0, "repetition_penalty": 0.6},
    "presence": {"presence_penalty": 3.0},
    "frequency": {"temperature": 0.8, "frequency_penalty": 1.5},
    "all penalties": {
        "temperature": 1.1,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": -0.6,
    },
}


@pytest.mark.parametrize("name", RULES)
def test_tokens_are_those_of_the_rules_and_the_noise(
    session: Session, draw: Draw, judge: Judge, name: str
) -> None:
    rules = pb.Sampling(seed=draw.seed(), **RULES[name])
    sequence = session.open(draw.prompt(), sampling=rules)
    sequence.decode(3)  # alone; longer ones are in the batch of all rules
    judge.check(sequence)


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_any_uint64_is_a_seed(session: Session, draw: Draw, judge: Judge, seed: int) -> None:
    sequence = session.open(draw.prompt(), sampling=pb.Sampling(temperature=1.0, seed=seed))
    sequence.decode(4)
    judge.check(sequence)


def test_rows_of_every_kind_share_a_batch(session: Session, draw: Draw, judge: Judge) -> None:
    count = min(len(RULES), session.executor.limits.max_rows)
    rules = [pb.Sampling(seed=draw.seed(), **fields) for fields in list(RULES.values())[:count]]
    sequences = [session.open(draw.short(), sampling=sampling) for sampling in rules]
    decode_together(sequences, 9)
    for sequence in sequences:
        judge.check(sequence)


def test_logit_bias_can_force_and_forbid(session: Session, draw: Draw, judge: Judge) -> None:
    prompt = draw.prompt()
    forbidden = session.open(prompt).emitted[0]
    forced = draw.other(forbidden)
    force = session.open(prompt, sampling=pb.Sampling(temperature=1.0, seed=3, logit_bias={forced: 1000.0}))
    forbid = session.open(prompt, sampling=pb.Sampling(logit_bias={forbidden: -1000.0}))
    for sequence in (force, forbid):
        sequence.decode(3)
        judge.check(sequence)
    assert set(force.emitted) == {forced}
    assert forbidden not in forbid.emitted


def test_bias_mild_enough_to_matter(session: Session, draw: Draw, judge: Judge) -> None:
    count = min(8, session.executor.limits.max_logit_bias)
    bias = {token: 1.5 - index % 4 for index, token in enumerate(draw.tokens(count))}
    sequence = session.open(
        draw.prompt(), sampling=pb.Sampling(temperature=1.0, seed=draw.seed(), logit_bias=bias)
    )
    sequence.decode(5)
    judge.check(sequence)


def test_stop_ids_are_masked_until_min_tokens(session: Session, draw: Draw, judge: Judge) -> None:
    """The would-be greedy tokens are the stop ids; they may come only after four others."""
    prompt = draw.prompt()
    scout = session.open(prompt)
    scout.decode(2)
    rules = pb.Sampling(stop_token_ids=scout.emitted, min_tokens=4)
    sequence = session.open(prompt, sampling=rules)
    sequence.decode(6)
    assert not set(sequence.emitted[:4]) & set(scout.emitted)
    judge.check(sequence)


def test_min_tokens_counts_from_prompt_length(session: Session, draw: Draw, judge: Judge) -> None:
    """Three tokens of output came before the opening: one more is masked, the next is not."""
    known = draw.prompt()
    scout = session.open(known)
    rules = pb.Sampling(stop_token_ids=[scout.emitted[0]], min_tokens=3)
    free = session.open(known, prompt_length=len(known) - 3, sampling=rules)
    bound = session.open(known, prompt_length=len(known) - 2, sampling=rules)
    judge.check(free)
    judge.check(bound)
    assert bound.emitted != scout.emitted


def test_the_same_seed_gives_the_same_tokens_and_no_seed_gives_others(
    session: Session, draw: Draw, judge: Judge
) -> None:
    prompt, rules = draw.prompt(), pb.Sampling(temperature=100.0, seed=draw.seed())
    seeded = [session.open(prompt, sampling=rules) for _ in range(2)]
    free = [session.open(prompt, sampling=pb.Sampling(temperature=100.0)) for _ in range(2)]
    for sequence in (*seeded, *free):
        sequence.decode(15)
    assert not judge.exact or seeded[0].emitted == seeded[1].emitted
    # The unseeded ones agree by chance once in vocabulary^16 runs.
    assert free[0].emitted != free[1].emitted


def test_the_noise_belongs_to_the_position_however_it_was_reached(
    session: Session, draw: Draw, judge: Judge
) -> None:
    """Whole, in chunks, after output named in the opening, and after a cut: one seed, one token."""
    prompt, rules = draw.prompt(), pb.Sampling(temperature=1.3, seed=draw.seed())
    whole = session.open(prompt, sampling=rules)
    chunked = session.open(prompt, sampling=rules, limit=5)
    while not chunked.emitted:
        chunked.feed(limit=4)
    cut = session.open(prompt, sampling=rules)
    cut.decode(2)
    cut.truncate(len(prompt) - 2)
    cut.feed(tokens=prompt[-2:])
    whole.decode(3)
    resumed = session.open([*whole.cached, *whole.pending], prompt_length=len(prompt), sampling=rules)
    for sequence in (whole, chunked, resumed):
        judge.check(sequence)
    judge.check(cut, outputs=1)


def test_penalties_see_tokens_that_the_client_fed(session: Session, draw: Draw, judge: Judge) -> None:
    rules = pb.Sampling(presence_penalty=20, repetition_penalty=1.5)
    sequence = session.open(draw.prompt(), sampling=rules)
    greedy = session.open([*sequence.cached, *sequence.pending]).emitted
    sequence.feed(tokens=[*sequence.pending, *greedy, *draw.tokens(3)])
    sequence.decode(3)
    judge.check(sequence, outputs=4)


PROTO = Path(__file__).parents[2] / "protos" / "paceline" / "executor" / "v1" / "executor.proto"
NUMBER = re.compile(r"(?:(\d+)\^)?(\d+)(?:-(\d+))?")  # 42, 2^63, 2^64-1


def proto_vectors() -> list[tuple[int, int, int, int, int, float]]:
    """The test vectors of the proto's comment: seed, position, token id, k, h, noise."""
    line = re.compile(r"//   (\S+)\s+(\S+)\s+(\S+)\s+([0-9a-f]{16})\s+([0-9a-f]{8})\s+(-?\d+\.\d{6})$")
    matches = [match for text in PROTO.read_text().splitlines() if (match := line.match(text))]
    return [
        (number(seed), number(position), number(token), int(k, 16), int(h, 16), float(noise))
        for seed, position, token, k, h, noise in (match.groups() for match in matches)
    ]


def number(text: str) -> int:
    match = NUMBER.fullmatch(text)
    assert match, text
    base, digits, less = match.groups()
    return (int(base) ** int(digits) if base else int(digits)) - int(less or 0)


def test_the_kits_noise_is_the_protos() -> None:
    """So that a kit gone wrong blames no executor."""
    vectors = proto_vectors()
    assert len(vectors) >= 10
    for seed, position, token, k, h, expected in vectors:
        assert noise.key(seed, position) == k
        assert noise.token_hash(seed, position, token) == h
        assert abs(noise.noise_of(np.array([h], np.uint32))[0] - expected) < 1e-6
        if token < 200_000:
            assert noise.token_hashes(seed, position, token + 1)[token] == h
