"""The examples do what they say, against a real executor."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline import ExecutorClient

from examples import own_scheduler, own_speculator
from tests.support.processes import ROOT, executor

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
        # The prompt's forward samples one token, each of the others 8 drafts and the token behind them.
        assert own_speculator.generate(client, prompt, 48) == (plain, 7)


OTHERS = {
    "tool_loop",  # of a scheduler; run in tests/unit/client/test_tools.py
    "test_own_program",  # run in tests/commands/test_testing_page.py
}


@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.py")} - OTHERS))
def test_each_example_runs_from_its_file(address: str, name: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), address],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout
