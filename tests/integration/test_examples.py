"""The examples do what they say, against a real executor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from paceline import ExecutorClient

from examples import beam_search, own_scheduler, own_speculator, tree_search
from executor_service.backends.numpy_sampler import log_softmax
from executor_service.backends.oracle_backend.oracle import OracleBackend
from executor_service.backends.oracle_backend.settings import OracleSettings
from tests.support.checkout import ROOT
from tests.support.processes import executor

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    bounds = ("--max-rows", "5", "--max-step-tokens", "24", "--vocab-size", "64")
    process = executor("--backend", "oracle", *bounds, directory=tmp_path_factory.mktemp("executor"))
    yield process.wait_serving().address
    process.terminate()


def test_many_prompts_in_a_step_get_the_tokens_that_each_gets_alone(address: str) -> None:
    prompts = [[i, i + 1, i + 2, i + 3] for i in range(12)]  # more than fit in a step
    with ExecutorClient(address) as client:
        together = own_scheduler.generate(client, prompts, 16)
        assert together == [own_scheduler.generate(client, [prompt], 16)[0] for prompt in prompts]
        assert client.get_status().sequences == 0


def test_drafts_change_the_number_of_forwards_and_no_token(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [5, 6, 7, 8] * 4
    with ExecutorClient(address) as client:
        plain = own_scheduler.generate(client, [prompt], 48)[0]
        assert own_speculator.generate(client, prompt, 48)[0] == plain

        def right(tokens: list[int], count: int) -> list[int]:
            return plain[len(tokens) - len(prompt) :][:count]

        monkeypatch.setattr(own_speculator, "draft", right)
        # The prompt's forward samples one token, each of the others 8 drafts and the token after them.
        assert own_speculator.generate(client, prompt, 48) == (plain, 7)


def next_logprobs(tokens: list[int]) -> NDArray[np.float32]:
    """Of each id after these tokens, by the oracle itself."""
    (whole,) = OracleBackend(OracleSettings(vocab_size=64)).forward_once(
        [np.array(tokens, np.int32)], frozenset({"logits"})
    )
    assert whole.logits is not None
    last: NDArray[np.float32] = log_softmax(whole.logits)[-1]
    return last


Continuation = tuple[tuple[int, ...], float]  # tokens, logprob


def continuations(
    prompt: list[int], depth: int, branches: int, width: int | None = None
) -> list[Continuation]:
    """Those by the `branches` likeliest tokens of each place, likeliest first; computed without a cache.

    `width`: of those of each length, only the likeliest so many are continued.
    """
    found: list[Continuation] = [((), 0.0)]
    for _ in range(depth):
        longer = [
            ((*tokens, token), logprob + float(logprobs[token]))
            for tokens, logprob in found
            for logprobs in [next_logprobs([*prompt, *tokens])]
            for token in np.argsort(-logprobs, kind="stable")[:branches].tolist()
        ]
        found = sorted(longer, key=lambda one: -one[1])[:width]
    return found


def test_beams_that_share_pages_are_those_that_are_computed_alone(address: str) -> None:
    prompt = [3, 1, 4, 1, 5]
    with ExecutorClient(address) as client:
        beams = beam_search.search(client, prompt, new_tokens=20, width=4)  # further than a page
        assert client.get_status().sequences == 0
    expected = continuations(prompt, 20, 4, width=4)
    assert [beam.tokens for beam in beams] == [tokens for tokens, _ in expected]
    assert [beam.logprob for beam in beams] == pytest.approx([logprob for _, logprob in expected], abs=1e-3)


def test_a_search_that_goes_back_finds_the_likeliest_of_all_continuations(address: str) -> None:
    depth, branches = 3, 4
    places = sum(branches**length for length in range(depth))  # a forward at each, if none is left out
    with ExecutorClient(address) as client:
        for start in range(4):
            prompt = [start, 7, 1, 8]
            tokens, logprob, forwards = tree_search.search(client, prompt, depth, branches)
            best, best_logprob = continuations(prompt, depth, branches)[0]
            assert tuple(tokens) == best
            assert logprob == pytest.approx(best_logprob, abs=1e-3)
            assert depth < forwards <= places
        _, greedy_logprob, greedy_forwards = tree_search.search(client, prompt, depth, branches=1)
        assert client.get_status().sequences == 0
    assert greedy_logprob <= logprob
    assert greedy_forwards == depth


def test_drafts_that_repeat_the_text_take_fewer_forwards_than_tokens(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    told = ("--backend", "script", "--script", str(EXAMPLES / "own_speculator.jsonl"))
    process = executor(*told, directory=tmp_path_factory.mktemp("script"))
    text, counts = run_example("own_speculator", process.wait_serving().address).splitlines()
    process.terminate()
    assert text.startswith(" Anna leads, and the others ride behind. Ben leads")
    tokens, forwards = (int(word) for word in counts.split() if word.isdecimal())
    assert tokens == len(text) == 100
    assert tokens > 1.5 * forwards


OTHERS = {
    "drill",  # starts a service of its own; run in tests/integration/scheduler/test_drill.py
    "own_speculator",  # of another executor; run above
    "tool_loop",  # of a scheduler; run in tests/unit/client/test_tools.py
    "scoring",  # of a scheduler; run in tests/integration/scheduler/test_evaluations.py
    "test_own_program",  # run in tests/commands/test_testing_page.py
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name == "kill_nine" else name
        for name in sorted({path.stem for path in EXAMPLES.glob("*.py")} - OTHERS)
    ],
)
def test_each_example_runs_from_its_file(
    address: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_example(name, address)


def run_example(name: str, address: str) -> str:
    """What the example prints."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), address]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdout=pipe, stderr=pipe, start_new_session=True) as run:
        try:
            printed, said = run.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # with the services that it has started
            raise
    assert run.returncode == 0, said
    return printed
