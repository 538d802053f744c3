"""Grammars are compiled once, beside the event loop, and kept for a while; what is wrong is told by row."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from paceline.executor.v1 import executor_pb2 as pb

from executor_service.backends.base import ModelDescription, TokenizerBundle
from executor_service.backends.byte_tokenizer import byte_tokenizer
from executor_service.backends.oracle_backend.oracle import OracleBackend
from executor_service.contract.plan import Fork, Opening, Reason, Refusal
from executor_service.grammar.source import GrammarInvalid, GrammarSource
from executor_service.rpc.codec.grammars import CompiledGrammars, sources_of
from executor_service.rpc.codec.rows import UNIFIED
from executor_service.rpc.codec.steps import decode_step
from executor_service.runtime.grammars import GrammarCompiler, grammar_compiler
from tests.unit.executor.fakes import limits
from tests.unit.executor.table_grammar import loops

LIMITS = limits(max_grammar_bytes=40)


class SlowEngine:
    """Compiles when it is let."""

    fingerprint = "slow"

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.threads: set[str] = set()
        self.go = threading.Event()

    def compile(self, source: GrammarSource) -> Any:
        self.threads.add(threading.current_thread().name)
        assert self.go.wait(60)
        self.compiled.append(source.text)
        if source.text == "bad":
            raise GrammarInvalid("it is bad")
        return loops()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine() -> SlowEngine:
    return SlowEngine()


@pytest.fixture
def compiler(engine: SlowEngine) -> GrammarCompiler:
    return GrammarCompiler(engine, vocab_size=257, eos_token_ids=(256,))  # type: ignore[arg-type]


def regex(text: str) -> GrammarSource:
    return GrammarSource("regex", text)


async def test_whoever_asks_while_a_grammar_is_compiled_gets_the_same_one(
    engine: SlowEngine, compiler: GrammarCompiler
) -> None:
    askers = [asyncio.create_task(compiler.get(regex("a"))) for _ in range(5)]
    await asyncio.sleep(0)  # the loop is free meanwhile
    askers[0].cancel()
    engine.go.set()
    first, *others = await asyncio.gather(*askers, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert len({id(grammar) for grammar in others}) == 1
    assert await compiler.get(regex("a")) is others[0]
    assert engine.compiled == ["a"]
    assert all(name.startswith("grammar") for name in engine.threads)


async def test_the_least_recent_grammar_is_forgotten_and_refusals_are_kept(
    engine: SlowEngine, compiler: GrammarCompiler
) -> None:
    engine.go.set()
    for _ in range(2):
        assert await compiler.get(regex("bad")) == "it is bad"
    await compiler.get(regex("a"))
    for number in range(63):
        await compiler.get(regex(f"x{number}"))
        await compiler.get(regex("a"))
    await compiler.get(regex("bad"))
    assert engine.compiled.count("a") == 1
    assert engine.compiled.count("bad") == 2


async def test_where_a_grammar_begins_takes_no_compiling(
    engine: SlowEngine, compiler: GrammarCompiler
) -> None:
    engine.go.set()
    begins = [await compiler.get(replace(regex("a"), begins_after=token)) for token in (7, 9, None)]
    assert engine.compiled == ["a"]
    assert [getattr(grammar, "begins_after", None) for grammar in begins] == [7, 9, None]
    assert await compiler.get(replace(regex("bad"), begins_after=7)) == "it is bad"


async def test_a_grammar_that_could_only_begin_behind_the_end_is_refused(compiler: GrammarCompiler) -> None:
    refused = await compiler.get(replace(regex("a"), begins_after=256))
    assert refused == "begins_after: token 256 ends a sequence"


def decode(step: pb.Step, compiled: CompiledGrammars) -> Any:
    return decode_step(step, LIMITS, UNIFIED, compiled)


def test_openings_and_forks_get_the_grammars_of_their_step() -> None:
    one, other = loops(), loops()
    step = pb.Step(
        ops=[
            pb.Op(release=pb.Release(cache_ids=[9])),
            pb.Op(fork=pb.Fork(cache_id=3, sampling=pb.Sampling(grammar=pb.Grammar(lark="b")))),
        ],
        openings=[
            pb.Opening(cache_id=1, tokens=[1], sampling=pb.Sampling(grammar=pb.Grammar(regex="a"))),
            pb.Opening(cache_id=2, tokens=[1]),
        ],
    )
    assert sources_of(step, LIMITS) == [regex("a"), GrammarSource("lark", "b")]
    plan = decode(step, {regex("a"): one, GrammarSource("lark", "b"): other})
    first, second = plan.openings
    assert isinstance(first, Opening)
    assert first.sampling.grammar is one
    assert second.sampling.grammar is None
    assert isinstance(plan.ops[1], Fork)
    assert plan.ops[1].sampling.grammar is other


@pytest.mark.parametrize(
    ("grammar", "reason", "text"),
    [
        (pb.Grammar(), Reason.INVALID, "grammar: one of json_schema, regex, choices, lark, structural_tag"),
        (pb.Grammar(regex=""), Reason.INVALID, "grammar.regex: must not be empty"),
        (pb.Grammar(choices=pb.GrammarChoices()), Reason.INVALID, "grammar.choices: at least one"),
        (
            pb.Grammar(lark="a" * 40),
            Reason.TOO_LARGE,
            "grammar: at most 40 bytes (max_grammar_bytes), has 42",
        ),
        (pb.Grammar(regex="bad"), Reason.GRAMMAR, "grammar.regex: it is bad"),
        (
            pb.Grammar(regex="a", begins_after=LIMITS.vocab_size),
            Reason.INVALID,
            f"grammar.begins_after: ids below {LIMITS.vocab_size}, has {LIMITS.vocab_size}",
        ),
    ],
)
def test_a_bad_grammar_refuses_its_row(grammar: pb.Grammar, reason: Reason, text: str) -> None:
    step = pb.Step(openings=[pb.Opening(cache_id=1, tokens=[1], sampling=pb.Sampling(grammar=grammar))])
    assert sources_of(step, LIMITS) == ([regex("bad")] if reason is Reason.GRAMMAR else [])
    (refusal,) = decode(step, {regex("bad"): "it is bad"}).openings
    assert refusal == Refusal(reason, f"openings[0].sampling.{text}")


def test_a_model_without_a_tokenizer_or_an_end_has_no_grammars() -> None:
    info = OracleBackend().info
    assert grammar_compiler(None, info) is None
    compiler = grammar_compiler(byte_tokenizer(), info)
    assert compiler is not None
    compiler.close()
    endless = ModelDescription(
        **{name: getattr(info, name) for name in ModelDescription.__slots__} | {"eos_token_ids": ()}
    )
    assert grammar_compiler(byte_tokenizer(), endless) is None
    broken = TokenizerBundle(b"{}", "", "", "", add_bos=False)
    assert grammar_compiler(broken, info) is None
