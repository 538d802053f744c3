"""The server of `paceline timeline --web`: for whoever has its URL; its own files and the log, no others."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import threading
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from paceline import timeline_page
from paceline.cli import timeline_web
from paceline.cli.app import app
from paceline.cli.timeline_web import StepStore, page_of
from paceline.errors import InternalError
from paceline.scheduler.v1 import scheduler_pb2 as pb
from typer.testing import CliRunner

from tests.unit.client.conftest import Served

PAGE = Path(timeline_page.__file__).parent


def log_of(first: int, steps: int = 2) -> pb.StepLog:
    log = pb.StepLog(first_step=first, started_at_us=1_700_000_000_000_000)
    for field in log.DESCRIPTOR.fields[3:16]:  # the columns of steps
        getattr(log, field.name).extend([1] * steps)
    log.event_counts.extend([1, *[0] * (steps - 1)])
    log.event_kinds.append(pb.STEP_EVENT_KIND_QUEUED)
    for column in (log.event_requests, log.event_indexes, log.event_values):
        column.append(5)
    log.names.add(number=5, request_id="r5")
    return log


def get(url: str, path: str = "") -> tuple[int, dict[str, str], bytes]:
    host = urlsplit(url).netloc
    connection = HTTPConnection(host, timeout=60)
    connection.request("GET", path or urlsplit(url).path)
    answer = connection.getresponse()
    try:
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_only_the_secret_path_is_answered_and_nothing_else_is_read() -> None:
    with page_of("file", StepStore(), None) as url:
        path = urlsplit(url).path
        assert len(path) > 20
        assert get(url)[0] == 200
        below = [path + name for name in ("../app.py", "%2e%2e/app.py", "why")]
        others = ("/", "/index.html", path[:-2] + "/", "/steps", *below)
        assert {get(url, other)[0] for other in others} == {404}
        with page_of("file", StepStore(), None) as another:
            assert urlsplit(another).path != path


def test_the_page_loads_its_own_files_alone_under_a_strict_policy() -> None:
    with page_of("file", StepStore(), None) as url:
        _, headers, body = get(url)
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert (headers["Referrer-Policy"], headers["Cache-Control"]) == ("no-referrer", "no-store")
        linked = re.findall(r'(?:src|href)="([^"]+)"', body.decode())
        assert linked == ["data:,", "timeline.css", "timeline.js"]
        names = {path.name for path in PAGE.iterdir() if not path.name.startswith("__")}
        assert names == set(timeline_page.FILES)
        for name in names:
            status, _, content = get(url, urlsplit(url).path + name)
            assert (status, content) == (200, (PAGE / name).read_bytes())
            assert b"http" not in content
            assert b"innerHTML" not in content


def test_the_log_comes_in_parts_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_web, "MAX_STEPS", 5)
    store = StepStore()
    for first in (1, 3, 5, 7):
        store.add(log_of(first))

    def after(number: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(store.after(number))
        return found

    everything = after(0)
    assert [part["first_step"] for part in everything["parts"]] == [5, 7]
    assert (everything["next"], after(4)["parts"]) == (4, [])
    assert [part["first_step"] for part in after(3)["parts"]] == [7]
    part = everything["parts"][0]
    assert part["names"] == [[5, "r5", ""]]
    assert (part["event_requests"], part["event_counts"], part["reasons"]) == ([5], [1, 0], [1, 1])
    wrong = log_of(9)
    wrong.tokens.append(1)
    with pytest.raises(InternalError):
        store.add(wrong)


def test_strangers_and_browsers_that_leave_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    store = StepStore()
    for first in range(1, 400_000, 4000):
        store.add(log_of(first, 4000))  # more than a connection takes that is not read
    before = set(threading.enumerate())  # other tests' servers have threads that wait for a next request
    with page_of("file", store, None) as url:
        address, path = ("127.0.0.1", int(urlsplit(url).port or 0)), urlsplit(url).path
        for asked in ("http://[", f"{path}steps"):
            with socket.create_connection(address) as connection:
                connection.sendall(f"GET {asked} HTTP/1.1\r\n\r\n".encode())
                assert connection.recv(9) == b"HTTP/1.1 "
                reset = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        for thread in set(threading.enumerate()) - before:
            if "process_request_thread" in thread.name:
                thread.join()
    assert capfd.readouterr().err == ""


async def test_the_command_serves_what_a_scheduler_says_of_its_requests(
    served: Served,
) -> None:
    store = StepStore()
    with page_of("scheduler", store, lambda request_id, identity: f"{identity}/{request_id}: waits") as url:
        path = urlsplit(url).path
        about = json.loads(get(url, path + "about")[2])
        assert about["live"] is True
        assert about["kinds"][pb.STEP_EVENT_KIND_QUEUED] == "queued"
        assert about["reasons"][pb.WAIT_REASON_PAGES] == "pages"
        assert json.loads(get(url, path + "why?id=r%201&identity=a")[2]) == {"text": "a/r 1: waits"}
        store.fail("gone")
        assert json.loads(get(url, path + "steps?after=x")[2])["error"] == "gone"
    words = ["timeline", served.address, "--web", "--seconds", "0.1"]
    result = await asyncio.to_thread(CliRunner().invoke, app, words)
    assert result.exit_code == 0, result.output
    assert "http://127.0.0.1:" in result.output
