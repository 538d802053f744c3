"""Models that can't be loaded or kept running: they say why, and the others go on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import grpc
import paceline
import pytest
from paceline.channel import Link, open_channel
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

from tests.support.memory import family
from tests.support.serve import Serve, completion, serving

pytestmark = pytest.mark.long

ANSWERS = '{"pattern": ".", "text": "hello"}\n'


@dataclass
class Ailing:
    """A service of `first`, `sound`, `never`, which has no script, and `later`, which is on demand."""

    serve: Serve
    directory: Path

    def script(self, model: str) -> Path:
        """The file of a model without which it can't be loaded."""
        return self.directory / f"{model}.txt"

    def kill_executor(self, model: str) -> None:
        mark = f"{self.script(model)}\0".encode()
        pids = family(self.serve.process.pid)
        [executor] = [pid for pid in pids if mark in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(executor, signal.SIGKILL)


@pytest.fixture(scope="module")
def ailing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ailing]:
    directory = tmp_path_factory.mktemp("ailing")
    scripted = "backend: script, executor: {{script: {}/{}.txt}}"
    models = [
        f"{{name: first, {scripted.format(directory, 'first')}}}",
        "{name: sound, executor: {vocab-size: 300}, on-demand: false}",
        "{name: never, backend: script, on-demand: false}",
        f"{{name: later, {scripted.format(directory, 'later')}}}",
    ]
    (directory / "models.yaml").write_text(f"models: [{', '.join(models)}]\n")
    (directory / "first.txt").write_text(ANSWERS)
    with serving(directory, str(directory / "models.yaml"), "--memory", "8GB", "--openai", "0") as serve:
        yield Ailing(serve, directory)


def test_a_model_that_can_not_load_fails_alone_and_says_why(ailing: Ailing) -> None:
    ailing.serve.wait_for("model never has failed: .*needs --script.*; the others go on")
    with open_channel(ailing.serve.address, Link.PUBLIC) as channel:
        call = SchedulerServiceStub(channel).GetModelInfo.future(pb.GetModelInfoRequest(model="never"))
        code, details = call.code(), call.details()
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "model never: failed, " in (details or "")
    with paceline.Client(ailing.serve.address) as client:
        assert client.complete("x", max_tokens=2, model="sound").token_ids


def test_a_model_that_has_failed_says_why_and_is_loaded_once_it_can_be(ailing: Ailing) -> None:
    """Its file is missing at first."""
    script = ailing.script("later")
    with open_channel(ailing.serve.address, Link.PUBLIC) as channel:
        stub = SchedulerServiceStub(channel)
        request = pb.GenerateRequest(text="x", model="later", stop=pb.StopConditions(max_tokens=2))
        asked = pb.GenerateUnaryRequest(request=request)
        call = stub.GenerateUnary.future(asked)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert "model later: failed, " in (call.details() or "")
        assert str(script) in (call.details() or "")
        script.write_text(ANSWERS)
        while (call := stub.GenerateUnary.future(asked)).code() is grpc.StatusCode.UNAVAILABLE:
            assert "model later: failed, " in (call.details() or "")
            time.sleep(0.05)  # calls without a pause would take the processors from the load
        assert call.code() is grpc.StatusCode.OK


def test_the_openai_door_serves_the_others_while_the_first_model_is_gone(ailing: Ailing) -> None:
    (door,) = ailing.serve.wait_for(r"OpenAI API at ([^\s,]+)")
    assert [completion(door, name)[0] for name in ("", "first", "sound")] == [200, 200, 200]
    ailing.script("first").unlink()
    ailing.kill_executor("first")
    ailing.serve.wait_for("model first has failed")
    status, answer = completion(door, "sound")
    assert (status, answer["model"]) == (200, "sound"), answer
    status, answer = completion(door, "")
    said = answer["error"]["message"]
    assert (status, "model first: failed" in said, f"{ailing.script('first')}" in said) == (
        503,
        True,
        True,
    ), said
    with urlopen(f"{door}/models", timeout=60) as listed:
        found = {one["id"]: one.get("state") for one in json.load(listed)["data"]}
    assert (found["sound"], found["first"] in ("failed", "loading")) == (None, True), found
