"""`paceline serve` and its clients, as processes, on the oracle."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import paceline
import pytest

from tests.support.checkout import environment
from tests.support.ports import kept_port
from tests.support.serve import Serve, gone, run, serving

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with serving(tmp_path_factory.mktemp("serve"), "-E", "step-ms=1") as serve:
        yield serve


def test_generate_finds_the_service_by_the_environment(shared: Serve) -> None:
    result = run("generate", "hello", "-m", "8", "-t", "0", "--json", PACELINE_ADDRESS=shared.address)
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0, result.stderr
    assert events[-1]["usage"]["completion_tokens"] == len(
        [token for event in events for token in event.get("token_ids", [])]
    )


def test_generate_waits_for_a_stack_that_is_only_starting(tmp_path: Path) -> None:
    port = str(kept_port())
    command = [sys.executable, "-m", "paceline", "serve", "--backend", "oracle", "--port", port]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment()) as serve:
        result = run("generate", "hello", "-m", "8", "-a", f"127.0.0.1:{port}")
        serve.terminate()
    assert result.returncode == 0, result.stderr
    assert f"waiting for process {serve.pid}, which is starting" in result.stderr


def test_status_shows_both_processes(shared: Serve) -> None:
    status = json.loads(run("status", "--json", "-a", shared.address).stdout)
    assert status["state"] == "serving"
    assert [executor["active"] for executor in status["executors"]] == [True]
    assert "serving" in run("status", "-a", shared.address).stdout


def test_bench_reports_what_was_asked(shared: Serve) -> None:
    result = run(
        "bench", "-c", "1,4", "--rounds", "2", "--new-tokens", "16", "--json", "-", "-a", shared.address
    )
    report = json.loads(result.stdout)
    assert [(level["requests"], level["tokens"]) for level in report["levels"]] == [(2, 32), (8, 128)]
    assert all(level["cached_tokens"] == 0 for level in report["levels"])
    assert all(level["decode_tokens_per_s"] > 0 for level in report["levels"])


def test_a_refusal_is_one_line_and_fails(shared: Serve) -> None:
    result = run("generate", "x", "--max-tokens", "1000000000", "-a", shared.address)
    assert result.returncode == 1
    assert result.stderr.startswith("paceline: ")
    assert "--max-tokens" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stop", ""], "--stop[0]: must not be empty"),
        (
            ["--drafter", "draft-executor", "--speculation", "2"],
            "--drafter: the server has no draft executor",
        ),
        (["-n", "1000"], "-n: must be within"),
    ],
)
def test_a_refusal_names_the_option(shared: Serve, arguments: list[str], said: str) -> None:
    result = run("generate", "x", "-a", shared.address, *arguments)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"paceline: {said}")


def test_a_stack_on_loopback_warns_of_nothing(shared: Serve) -> None:
    assert "WARNING" not in shared.log


def test_a_killed_parent_takes_its_services_along(tmp_path: Path) -> None:
    with serving(tmp_path, "--draft-backend", "oracle", "-D", "draft-agreement=0.9") as serve:
        with paceline.Client(serve.address) as client:
            (completion,) = client.completions("x", max_tokens=30, temperature=0, speculation=4)
            assert completion.finished is not None
            assert completion.finished.usage.accepted_tokens > 0
        assert "drafts from oracle" in serve.log
        children = serve.children()
        assert set(children) == {"executor_service", "draft", "scheduler_service"}
        serve.process.kill()
        serve.process.wait()
        deadline = time.monotonic() + 60
        while left := [name for name, pid in children.items() if not gone(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.02)


@pytest.mark.slow  # test_speculation.py has it of a scheduler
def test_a_draft_model_of_another_vocabulary_is_reported_and_serve_fails() -> None:
    draft = ["--draft-backend", "oracle", "-D", "vocab-size=100"]
    result = run("serve", "--backend", "oracle", "--port", "0", *draft)
    assert result.returncode == 1
    *_, reason, last = result.stderr.strip().splitlines()
    assert last == "paceline: the scheduler ended (exit status 2)"
    assert "100 tokens" in reason
    assert "257 tokens" in reason


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGHUP,  # a terminal that closes
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_one_signal_lets_streams_end_and_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path, "-E", "step-ms=5") as serve, paceline.Client(serve.address) as client:
        children = serve.children()
        stream = client.generate("long", max_tokens=150, ignore_eos=True)
        next(stream)
        serve.process.send_signal(number)
        serve.wait_for("letting running requests end")
        [completion] = stream.collect()
        assert completion.finished is not None
        assert serve.process.wait(60) == 0, serve.log
        assert all(gone(pid) for pid in children.values())
        assert "died" not in serve.log
        assert "WARNING" not in serve.log


@pytest.mark.slow  # test_lifecycle.py has it of a scheduler
def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with (
        serving(tmp_path, "-E", "step-ms=50") as serve,
        paceline.Client(serve.address, failover_timeout_s=0) as client,
    ):
        children = serve.children()
        stream = client.generate("very long", max_tokens=20_000, ignore_eos=True)
        next(stream)
        serve.process.send_signal(signal.SIGINT)
        serve.wait_for("letting running requests end")
        serve.process.send_signal(signal.SIGINT)
        assert serve.process.wait(60) == 0, serve.log
        assert all(gone(pid) for pid in children.values())
        with pytest.raises(paceline.PacelineError):
            stream.collect()


def test_a_port_in_use_is_reported_in_one_line(shared: Serve) -> None:
    result = run("serve", "--backend", "oracle", "--port", shared.address.rpartition(":")[2])
    assert result.returncode == 1
    [line] = result.stderr.strip().splitlines()
    assert line.endswith(": choose one with --port, or 0")
    if sys.platform == "linux":
        pid = shared.children()["scheduler_service"]
        assert f"is taken by a Paceline scheduler (pid {pid}; `paceline ps` lists what runs)" in line


def test_a_bad_model_is_reported_and_serve_fails(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    result = run("serve", "--backend", "torch", "--model", str(broken), "--port", "0")
    assert result.returncode == 1
    assert "paceline: the executor ended" in result.stderr
    assert "broken.gguf" in result.stderr


def test_executor_and_scheduler_explain_their_own_flags() -> None:
    assert "--kv-memory" in run("executor", "--help").stdout
    assert "--failover-timeout-s" in run("scheduler", "--help").stdout
