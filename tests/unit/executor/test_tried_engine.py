"""A grammar that is too much for the library ends a process that tries it, and no other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from service_kit import standstill

from executor_service.backends.byte_tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer
from executor_service.grammar.engine import GrammarEngine
from executor_service.grammar.source import UNTRIED, GrammarInvalid, GrammarSource
from executor_service.grammar.tried_engine import TrialProcess, TriedEngine
from tests.support.processes import stop

SETTINGS = {
    "tokenizer_json": byte_tokenizer().tokenizer_json.decode(),
    "vocab_size": VOCAB_SIZE,
    "eos_token_ids": (EOS_ID,),
    "compile_fuel": 1_000_000,
    "step_fuel": 50_000,
}
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process does")
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


@linux
@pytest.mark.parametrize("bulk", [0, 1 << 20], ids=["small", "more than a pipe holds"])
def test_a_process_that_stands_still_is_replaced_and_its_grammar_is_tried_once_more(
    trial: TrialProcess, monkeypatch: pytest.MonkeyPatch, bulk: int
) -> None:
    monkeypatch.setattr(standstill, "MAX_STILL_S", 0.2)
    assert trial.why_not(WHOLE) == ""
    assert trial._process is not None
    before = trial._process.pid
    stop(before)
    assert "invalid regex" in trial.why_not(GrammarSource("regex", "a" * bulk + "(a"))
    assert trial._process is not None
    assert trial._process.pid != before


@linux
def test_a_grammar_that_no_process_answers_is_not_called_invalid_for_ever(
    trial: TrialProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = TrialProcess._running

    def stopped(self: TrialProcess) -> subprocess.Popen[bytes]:
        process = running(self)
        stop(process.pid)
        return process

    with monkeypatch.context() as changed:
        changed.setattr(standstill, "MAX_STILL_S", 0.0)
        changed.setattr(TrialProcess, "_running", stopped)
        assert trial.why_not(WHOLE) == UNTRIED
    assert trial.why_not(WHOLE) == ""


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
