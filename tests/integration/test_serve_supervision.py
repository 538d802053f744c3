"""`paceline serve` under fire: frozen services, crash loops, readers that leave, terminals that close."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import paceline
import pytest

from tests.support.checkout import environment
from tests.support.serve import Serve, gone, serving

pytestmark = pytest.mark.long

SERVE = [sys.executable, "-m", "paceline", "serve", "--backend", "oracle", "--port", "0"]


def tokens(client: paceline.Client, disturb: Callable[[], None] | None = None) -> list[int]:
    """200 tokens of one prompt, disturbed in the middle."""
    ids: list[int] = []
    for event in client.generate("the same", max_tokens=200, temperature=0, ignore_eos=True):
        if isinstance(event, paceline.Delta):
            if disturb is not None and len(ids) < 50 <= len(ids) + len(event.token_ids):
                disturb()
            ids += event.token_ids
    return ids


def test_an_executor_that_is_killed_or_frozen_is_replaced_and_streams_go_on(tmp_path: Path) -> None:
    with serving(tmp_path, "-E", "step-ms=5") as serve, paceline.Client(serve.address) as client:
        undisturbed = tokens(client)
        for count, (number, said) in enumerate(
            {
                signal.SIGKILL: r"died \(SIGKILL\); starting it again",
                signal.SIGSTOP: r"executor.* frozen: stopped by a signal for \d+ s; died \(SIGKILL\)",
            }.items(),
            start=1,
        ):
            victim = serve.children()["executor_service"]
            assert tokens(client, partial(os.kill, victim, number)) == undisturbed
            serve.wait_for(said)
            assert gone(victim)
            serve.wait_for("serves again", count)
            assert [one.losses for one in client.executors(timeout_s=60)] == [count]


@pytest.mark.slow  # as a frozen executor is; what clients see is in test_two_schedulers.py
def test_a_frozen_scheduler_is_replaced_with_the_same_tokens_in_force(tmp_path: Path) -> None:
    with serving(tmp_path, PACELINE_TOKEN="sesame") as serve:
        address = serve.address
        os.kill(serve.children()["scheduler_service"], signal.SIGSTOP)
        serve.wait_for(r"scheduler.* frozen: stopped by a signal")
        serve.wait_for(r"scheduler.* serves again")
        with paceline.Client(address, security=paceline.Security(token="sesame")) as client:
            assert client.completions("x", max_tokens=2, timeout_s=60)
        with paceline.Client(address) as client, pytest.raises(paceline.errors.Unauthenticated):
            client.model_info(timeout_s=60)


@pytest.mark.slow
def test_nothing_is_replaced_when_everything_was_stopped(tmp_path: Path) -> None:
    with serving(tmp_path, "-E", "step-ms=5") as serve, paceline.Client(serve.address) as client:
        children = serve.children()
        everything = [*children.values(), serve.process.pid]
        for pid in everything:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(35)  # longer than any patience
        for pid in reversed(everything):  # who judges wakes first
            os.kill(pid, signal.SIGCONT)
        for _ in range(5):
            assert len(tokens(client)) == 200
            time.sleep(1)
        assert serve.children() == children
        assert "died" not in serve.log


def test_a_crash_loop_ends_serve_with_the_services_last_log_lines(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("{}\n")
    serve = Serve(tmp_path, "-E", f"config={settings}")
    try:
        assert serve.address
        settings.write_text("pages: none\n")  # from now on it can't start
        os.kill(serve.children()["executor_service"], signal.SIGKILL)
        assert serve.process.wait(120) == 1
        *_, reason, last = serve.log.strip().splitlines()
        assert last.startswith("paceline: gave up: exit status 2 means that its settings")
        assert "--pages" in reason
    finally:
        serve.process.kill()
        serve.process.wait()


def test_serve_continues_when_its_log_is_not_read(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    process = subprocess.Popen(
        [*SERVE, "--port-file", str(port_file)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        assert process.stdout is not None
        assert any(b"Serving oracle" in line for line in iter(process.stdout.readline, b""))
        process.stdout.close()  # as `| head -1` does
        serve = Serve.of(process, port_file)
        with paceline.Client(serve.address) as client:
            for _ in range(2):  # each death is worth a line
                before = serve.children()["executor_service"]
                os.kill(before, signal.SIGKILL)
                assert client.completions("x", max_tokens=2, timeout_s=60)
                assert serve.children()["executor_service"] != before
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_under_nohup_a_closed_terminal_has_no_effect(tmp_path: Path) -> None:
    port_file, log_file = tmp_path / "port", tmp_path / "log"
    command = [*SERVE, "--port-file", str(port_file)]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with log_file.open("wb") as log:  # ignored signals are inherited
            process = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)
    finally:
        signal.signal(signal.SIGHUP, before)
    serve = Serve.of(process, log_file)
    try:
        serve.wait_for(r"Serving \S+ at")
        with paceline.Client(f"127.0.0.1:{port_file.read_text().strip()}") as client:
            process.send_signal(signal.SIGHUP)
            assert client.completions("x", max_tokens=2, timeout_s=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert serve.log.count("letting running requests end") == 1
    finally:
        process.kill()
        process.wait()
