"""`paceline serve --openai`: keys, a full queue, a gateway that dies or freezes."""

from __future__ import annotations

import os
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gateway.support import url_of
from tests.support.serve import Serve, gone, serving

pytestmark = pytest.mark.openai


def gateway_pid(serve: Serve) -> int:
    pids = Path(f"/proc/{serve.process.pid}/task/{serve.process.pid}/children").read_text().split()
    [found] = [int(pid) for pid in pids if b"gateway_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


def status(url: str, key: str = "", *, path: str = "/chat/completions", body: bytes | None = b"{}") -> int:
    """Of a request; 400 where nothing but the body was wrong."""
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url + path, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_without_the_key_nothing_is_served_and_nobody_reaches_the_control_plane(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("open-sesame\n")
    with serving(tmp_path, "--openai", "0", f"--api-key-file={tmp_path / 'key'}") as serve:
        url = url_of(serve)
        assert [status(url, key) for key in ("", "wrong", "open-sesame")] == [401, 401, 400]
        for key in ("", "open-sesame"):
            for path in ("/workers", "/flush_cache", "/wasm"):
                assert status(url.removesuffix("/v1"), key, path=path) == 401
        shown = Path(f"/proc/{gateway_pid(serve)}/cmdline").read_bytes()
        shown += Path(f"/proc/{gateway_pid(serve)}/environ").read_bytes()
        assert b"open-sesame" not in shown


def test_the_token_of_clients_is_the_key_unless_there_is_one(tmp_path: Path) -> None:
    with serving(tmp_path, "--openai", "0", "--served-model-name", "mine", PACELINE_TOKEN="sesame") as serve:
        url = url_of(serve)
        assert [status(url, key) for key in ("", "sesame")] == [401, 400]
        assert b'"mine"' in urllib.request.urlopen(url + "/models", timeout=30).read()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_gateway_that_dies_or_freezes_is_replaced_on_its_port(tmp_path: Path, number: int) -> None:
    with serving(tmp_path, "--openai", "0") as serve:
        url, before = url_of(serve), gateway_pid(serve)
        os.kill(before, number)
        serve.wait_for(r"gateway.* died \(SIGKILL\)")
        serve.wait_for(r"gateway.* serves again")
        assert status(url) == 400
        assert gone(before)
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(60) == 0, serve.log


def test_a_full_queue_answers_429(tmp_path: Path) -> None:
    question = b'{"model": "oracle", "prompt": "x", "max_tokens": 400, "ignore_eos": true}'
    small = ("-S", "max-running=1", "-S", "max-queued-requests=1", "-E", "step-ms=20")
    with serving(tmp_path, "--openai", "0", *small) as serve, ThreadPoolExecutor(6) as threads:
        url = url_of(serve)
        answers = threads.map(lambda _: status(url, path="/completions", body=question), range(6))
        assert sorted(set(answers)) == [200, 429]


def test_a_scheduler_that_dies_is_known_to_the_gateway_again(tmp_path: Path) -> None:
    question = b'{"model": "oracle", "prompt": "x", "max_tokens": 2}'
    with serving(tmp_path, "--openai", "0") as serve:
        url = url_of(serve)
        assert status(url, path="/completions", body=question) == 200
        os.kill(serve.children()["scheduler_service"], signal.SIGKILL)
        serve.wait_for(r"scheduler.* serves again")
        until = time.monotonic() + 60  # it looks every two seconds
        while (code := status(url, path="/completions", body=question)) != 200:
            assert code in (502, 503), code
            assert time.monotonic() < until, "the gateway has not found it again"
            time.sleep(0.1)
