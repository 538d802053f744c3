"""A LiveService serves what it was told, tells why it can't, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paceline import ExecutorClient, errors
from paceline.testing import LiveConfig, LiveService, LiveServiceError
from paceline.testing.live_config import flags

from tests.support.serve import gone
from tests.support.untyped import present

pytestmark = pytest.mark.long

LINES = [
    {"message": "Why is the sky blue?", "text": "Rayleigh scattering."},
    {"pattern": "city", "text": '{"city":"Paris"}'},
    {"message": "Call it.", "text": '<tool_call>\n{"name": "double", "arguments": {"x": 3}}\n</tool_call>'},
]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
_WAIT_S = 60.0


def double(x: int) -> int:
    """Twice x."""
    return 2 * x


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_it_serves_a_script_to_both_clients_and_then_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_EXECUTOR_VOCAB_SIZE", "3")  # somebody's own service, and not this one
    monkeypatch.setenv("PACELINE_TOKEN", "theirs")
    config = LiveConfig(script=LINES, executor={"max_rows": 8}, scheduler={"reflection": True})
    with LiveService(config) as service:
        with service.client() as client:
            asked = [{"role": "user", "content": "Why is the sky blue?"}]
            assert client.chat(asked, temperature=1.5).text == "Rayleigh scattering."
            (call,) = client.chat([{"role": "user", "content": "Call it."}], tools=[double]).tool_calls
            assert (call.name, call.parsed) == ("double", {"x": 3})
            with pytest.raises(errors.InternalError, match="has no answer for the prompt 'Once'"):
                client.complete("Once")
            with pytest.raises(errors.InvalidRequest, match=r"line 2 .* does not match the grammar"):
                client.complete("a city", schema=CITY)
        async with service.aio_client() as asynchronous:
            assert (await asynchronous.complete("a city")).text == '{"city":"Paris"}'
        with ExecutorClient(service.executor_address) as executor:
            assert executor.get_info().limits.max_rows == 8
        pids = [process.pid for process in service._processes]
        directory = present(service._directory)
    wait_until_gone(*pids)
    with pytest.raises(FileNotFoundError):
        os.stat(directory.name)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (LiveConfig(executor={"max_row": 8}), r"the executor ended \(exit status 2\):\n.*max-rows"),
        (LiveConfig(script=[{"prompt": "a"}]), r"the executor ended .*\n.*script.jsonl:1: expected `text`"),
    ],
)
def test_what_can_not_start_says_why(config: LiveConfig, complaint: str) -> None:
    with pytest.raises(LiveServiceError, match=complaint):
        LiveService(config).start()


def test_one_that_takes_too_long_says_so_and_is_gone() -> None:
    service = LiveService(LiveConfig(start_timeout_s=0.0))
    with pytest.raises(LiveServiceError, match="the service does not listen after 0 s"):
        service.start()
    assert not service._processes


def test_a_process_that_died_meanwhile_is_not_overlooked() -> None:
    service = LiveService()
    service.start()
    with pytest.raises(LiveServiceError, match="was started before"):
        service.start()
    executor, scheduler = (process.pid for process in service._processes)
    os.kill(executor, signal.SIGKILL)
    os.waitid(os.P_PID, executor, os.WEXITED | os.WNOWAIT)
    with pytest.raises(LiveServiceError, match=r"while the tests ran, the executor ended \(SIGKILL\)"):
        service.stop()
    wait_until_gone(scheduler)


KILLED = """
import os, signal, sys
from paceline.testing import LiveService
service = LiveService()
service.start()
print(*(process.pid for process in service._processes), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_its_processes_end_with_a_parent_that_is_killed() -> None:
    run = subprocess.run(
        [sys.executable, "-c", KILLED],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=_WAIT_S,
        check=False,
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    wait_until_gone(*map(int, run.stdout.split()))


def test_settings_become_flags_of_their_kind(tmp_path: Path) -> None:
    assert flags({"step_ms": 2.5, "reflection": True, "insecure": False}) == [
        "--step-ms=2.5",
        "--reflection",
        "--no-insecure",
    ]
    named = LiveConfig(script="answers.jsonl").executor_flags(tmp_path)
    assert named == ["--backend=script", f"--script={Path('answers.jsonl').absolute()}"]


def test_a_model_has_the_name_that_the_scheduler_gives_it_and_no_other() -> None:
    config = LiveConfig(script=LINES, scheduler={"model_name": "team/chat:1"})
    with LiveService(config) as service, service.client() as client:
        assert client.model_info().name == "team/chat:1"
        asked = [{"role": "user", "content": "Why is the sky blue?"}]
        assert client.chat(asked, model="team/chat:1").text == "Rayleigh scattering."
        with pytest.raises(errors.NotFound, match="'script' is not served, 'team/chat:1' is"):
            client.chat(asked, model="script")
