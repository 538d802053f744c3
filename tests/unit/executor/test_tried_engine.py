"""A grammar that is too much for the library ends a process that tries it, and no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from executor_service.backends.byte_tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer
from executor_service.grammar.engine import GrammarEngine
from executor_service.grammar.source import GrammarInvalid, GrammarSource
from executor_service.grammar.tried_engine import TrialProcess, TriedEngine

SETTINGS = {
    "tokenizer_json": byte_tokenizer().tokenizer_json.decode(),
    "vocab_size": VOCAB_SIZE,
    "eos_token_ids": (EOS_ID,),
    "compile_fuel": 1_000_000,
    "step_fuel": 50_000,
}
WHOLE = GrammarSource("regex", "a+")
BROKEN = GrammarSource("regex", "(a")
# Each terminal is the next one twice: the library's simplification takes minutes before its fuel ends it.
HEAVY = GrammarSource(
    "lark", "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(2000)) + 'T2000: "a"'
)


@pytest.fixture(scope="module")
def trial() -> Iterator[TrialProcess]:
    trial = TrialProcess({**SETTINGS, "cpu_s": 0.5})
    yield trial
    trial.close()


def test_work_that_no_fuel_counts_is_ended_by_cpu_time(trial: TrialProcess) -> None:
    assert trial.why_not(WHOLE) == ""
    assert trial.why_not(HEAVY) == "it takes more work to compile than the limits allow"
    assert trial.why_not(WHOLE) == ""
    assert "unclosed group" in trial.why_not(BROKEN)


def test_a_process_that_somebody_else_has_ended_is_started_again(trial: TrialProcess) -> None:
    assert trial.why_not(WHOLE) == ""
    assert trial._process is not None
    trial._process.kill()
    assert "unclosed group" in trial.why_not(BROKEN)


def test_a_grammar_that_ends_the_process_is_refused(trial: TrialProcess) -> None:
    class Dies:
        kind, text, choices = "choices", "", (3,)  # the process ends with a traceback

    assert trial.why_not(Dies()) == "the grammar engine failed on this grammar"  # type: ignore[arg-type]
    assert trial.why_not(WHOLE) == ""


def test_what_was_tried_is_compiled_here_and_what_was_not_is_refused() -> None:
    engine = GrammarEngine(byte_tokenizer().tokenizer_json, VOCAB_SIZE, (EOS_ID,), 1_000_000, 50_000)
    tried = TriedEngine(engine, SETTINGS, 1)
    assert tried.fingerprint == engine.fingerprint
    assert tried.compile(WHOLE).matcher().forced() == [ord("a")]
    with pytest.raises(GrammarInvalid, match="unclosed group"):
        tried.compile(BROKEN)
    tried.close()
    with pytest.raises(GrammarInvalid, match="the executor ends"):
        tried.compile(WHOLE)
