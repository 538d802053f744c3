"""Hostile grammars: compiled or refused in a line, walked or stuck, and never anything else."""

from __future__ import annotations

import os
import random
import time

import numpy as np
import pytest

from executor_service.backends.byte_tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer
from executor_service.contract.grammar import GrammarStuck
from executor_service.contract.masks import allowed_tokens
from executor_service.grammar.automaton import Automaton
from executor_service.grammar.engine import GrammarEngine
from executor_service.grammar.source import GrammarInvalid, GrammarSource
from executor_service.runtime.grammars import COMPILE_FUEL, STEP_FUEL
from tests.fuzz.hostile_grammars import HostileGrammars

TOKENS = 12


def survive(engine: GrammarEngine, source: GrammarSource, rng: random.Random) -> str:
    """Compile a grammar and walk through it; says how that ended."""
    try:
        automaton = Automaton(engine.compile(source))
    except GrammarInvalid as error:
        message = str(error)
        assert 0 < len(message) < 1000, source
        assert "\n" not in message, source
        return "refused"
    output = np.zeros(0, np.int32)
    try:
        for _ in range(TOKENS):
            following = np.flatnonzero(allowed_tokens(automaton.mask(), VOCAB_SIZE))
            output = np.append(output, following[rng.randrange(len(following))].astype(np.int32))
            assert automaton.follow(output) == len(output), source
            automaton.forced()
    except GrammarStuck:
        return "stuck"
    return "ended" if EOS_ID in output else "went on"


def resident_mb() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def run(count: int, seed: int) -> dict[str, int]:
    engine = GrammarEngine(byte_tokenizer().tokenizer_json, VOCAB_SIZE, (EOS_ID,), COMPILE_FUEL, STEP_FUEL)
    grammars, rng = HostileGrammars(seed), random.Random(seed)
    ends: dict[str, int] = {}
    for _ in range(count):
        end = survive(engine, grammars.draw(), rng)
        ends[end] = ends.get(end, 0) + 1
    return ends


def test_hostile_grammars_are_refused_or_walked() -> None:
    ends = run(300, 1)
    assert set(ends) <= {"refused", "stuck", "ended", "went on"}
    assert ends["refused"] > 50
    assert ends["went on"] > 50


@pytest.mark.slow
def test_ten_thousand_hostile_grammars_leave_memory_flat() -> None:
    run(2000, 2)
    before_mb, began_s = resident_mb(), time.monotonic()
    ends = run(10_000, 3)
    grown_mb = resident_mb() - before_mb
    print(f"10,000 hostile grammars: {ends}, {time.monotonic() - began_s:.0f} s, {grown_mb:+.0f} MB")
    assert grown_mb < 100
