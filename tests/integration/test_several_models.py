"""Several models at one address: each call reaches its model, and one's death leaves the others' streams."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import paceline
import pytest
from paceline import errors
from paceline.channel import Link, Security, open_channel
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

from tests.support.memory import family
from tests.support.serve import Serve, gone, run, serving

SIZES = {"a": 257, "team/b": 300, "c:1": 400}
"""The models: oracles of these vocabularies, whose tokens differ."""
PROMPT, TOKENS = "the same", 120


def file_of_models(directory: Path, **more: str) -> Path:
    path = directory / "models.yaml"
    entries = [f"- {{name: 'c:1', executor: {{vocab-size: {SIZES['c:1']}, step-ms: 5}}}}"]
    for name in ("team/b", "a"):
        extra = f", {more[name]}" if name in more else ""
        entries.insert(0, f"- {{name: '{name}', executor: {{vocab-size: {SIZES[name]}, step-ms: 5}}{extra}}}")
    path.write_text("models:\n" + "\n".join(f"  {one}" for one in entries) + "\n")
    return path


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    directory = tmp_path_factory.mktemp("service")
    with serving(directory, str(file_of_models(directory))) as serve:
        yield serve


def tokens(client: paceline.Client, model: str = "", started: threading.Event | None = None) -> list[int]:
    ids: list[int] = []
    options = {"model": model} if model else {}
    for event in client.generate(PROMPT, max_tokens=TOKENS, temperature=0, ignore_eos=True, **options):  # type: ignore[arg-type]
        if isinstance(event, paceline.Delta):
            ids += event.token_ids
            if started is not None and len(ids) > TOKENS // 6:
                started.set()
    return ids


def processes(serve: Serve, kind: str) -> dict[str, int]:
    """Ids of the processes of a kind, by model."""
    pids = Path(f"/proc/{serve.process.pid}/task/{serve.process.pid}/children").read_text().split()
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0") for pid in pids}
    marks = {
        "scheduler_service": {f"--model-name={name}": name for name in SIZES},
        "executor_service": {f"--vocab-size={size}": name for name, size in SIZES.items()},
    }[kind]
    return {
        marks[word]: pid for pid, words in lines.items() if kind in words for word in words if word in marks
    }


def pids_of(serve: Serve, module: str) -> list[int]:
    """Processes of a module, the oldest first."""
    pids = Path(f"/proc/{serve.process.pid}/task/{serve.process.pid}/children").read_text().split()
    return [int(pid) for pid in pids if f"-m\0{module}\0" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_each_call_reaches_the_model_that_it_names_and_has_its_tokens(service: Serve, tmp_path: Path) -> None:
    with paceline.Client(service.address) as client:
        answers = {name: tokens(client, name) for name in SIZES}
        assert len({tuple(ids) for ids in answers.values()}) == len(SIZES)
        assert tokens(client) == answers["a"]  # the first one is what calls mean that name none
    alone = serving(tmp_path, "-E", f"vocab-size={SIZES['team/b']}")
    with alone as serve, paceline.Client(serve.address) as client:
        assert tokens(client) == answers["team/b"]


@pytest.mark.parametrize("name", ["nobody", "../../etc/passwd", "a\n\x1b[2J", "a" * 100_000, "ä"])
def test_an_unknown_name_is_refused_with_the_names_that_there_are(service: Serve, name: str) -> None:
    with paceline.Client(service.address) as client, pytest.raises(errors.NotFound) as refused:
        client.complete("x", model=name, max_tokens=1)
    assert "a, team/b, c:1 are" in refused.value.message
    assert len(refused.value.message) < 1000
    assert refused.value.message.isprintable()


def test_ten_thousand_unknown_names_leave_the_models_answers_as_they_were(service: Serve) -> None:
    with open_channel(service.address, Link.PUBLIC) as channel:
        stub = SchedulerServiceStub(channel)
        calls = []
        for number in range(10_000):
            calls.append(stub.GetModelInfo.future(pb.GetModelInfoRequest(model=f"no-{number}")))
            if len(calls) == 100:
                assert {call.code() for call in calls} == {grpc.StatusCode.NOT_FOUND}
                calls.clear()
    with paceline.Client(service.address) as client:
        assert client.complete("x", model="c:1", max_tokens=2).token_ids


def test_metadata_names_the_model_of_calls_that_have_no_field_for_it(service: Serve) -> None:
    with paceline.Client(service.address) as client:
        names = [client.view(metadata={"paceline-model": name}).model_info().name for name in SIZES]
        assert names == list(SIZES)
        with pytest.raises(errors.NotFound, match="'nobody' is not served"):
            client.view(metadata={"paceline-model": "nobody"}).status()


def test_what_was_begun_at_any_model_is_aborted_by_its_id_alone(service: Serve) -> None:
    with paceline.Client(service.address) as client:
        generation = client.generate("x", max_tokens=5000, ignore_eos=True, model="c:1", request_id="of-c")
        next(iter(generation))
        assert client.abort(["of-c", "of-nobody"]) == paceline.Aborted(("of-c",), ("of-nobody",))
        with pytest.raises(errors.PacelineError, match="abort"):
            for _ in generation:
                pass


@pytest.mark.parametrize("kind", ["executor_service", "scheduler_service"])
def test_a_killed_process_of_one_model_leaves_all_streams_with_the_same_tokens(
    service: Serve, kind: str
) -> None:
    with paceline.Client(service.address) as client:
        undisturbed = {name: tokens(client, name) for name in SIZES}
        others = {name: pid for name, pid in processes(service, kind).items() if name != "team/b"}
        victim = processes(service, kind)["team/b"]
        found: dict[str, list[int]] = {}
        started = {name: threading.Event() for name in SIZES}

        def stream(name: str) -> None:
            found[name] = tokens(client, name, started[name])

        threads = [threading.Thread(target=stream, args=(name,)) for name in SIZES]
        for thread in threads:
            thread.start()
        for event in started.values():
            assert event.wait(60)
        os.kill(victim, signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert found == undisturbed
        assert gone(victim)
        now = processes(service, kind)
        assert {name: now[name] for name in others} == others  # nobody else was restarted


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_another_router_takes_the_place_of_one_that_is_killed_or_stopped_under_its_streams(
    service: Serve, number: signal.Signals
) -> None:
    with paceline.Client(service.address, failover_timeout_s=300) as client:
        undisturbed = {name: tokens(client, name) for name in ("a", "c:1")}
        found: dict[str, list[int]] = {}
        started = {name: threading.Event() for name in undisturbed}

        def stream(name: str) -> None:
            found[name] = tokens(client, name, started[name])

        while len(routers := pids_of(service, "paceline_router")) < 2:
            pass  # the last test's spare one is being replaced
        threads = [threading.Thread(target=stream, args=(name,)) for name in undisturbed]
        for thread in threads:
            thread.start()
        for event in started.values():
            assert event.wait(60)
        os.kill(routers[0], number)
        for thread in threads:
            thread.join()
        assert found == undisturbed
        assert gone(routers[0])
        assert pids_of(service, "paceline_router")[0] == routers[1]
    service.wait_for(
        r"router (frozen: stopped by a signal; )?died \(SIGKILL\); another takes its place",
        1 + (number is signal.SIGSTOP),
    )


def test_a_model_that_can_not_load_fails_alone_and_says_why(tmp_path: Path) -> None:
    models = file_of_models(tmp_path, **{"team/b": "backend: script"})  # without its script
    with serving(tmp_path, str(models)) as serve, paceline.Client(serve.address) as client:
        serve.wait_for("model team/b has failed, and the others go on: .*needs --script")
        assert client.complete("x", max_tokens=2, model="c:1").token_ids
        with open_channel(serve.address, Link.PUBLIC) as channel:
            call = SchedulerServiceStub(channel).GetModelInfo.future(pb.GetModelInfoRequest(model="team/b"))
            code, details = call.code(), call.details()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "model team/b: failed, " in (details or "")


def states(stub: SchedulerServiceStub) -> dict[str, int]:
    """The models' states, as the directory lists them."""
    call = stub.WatchSchedulers(pb.WatchSchedulersRequest())
    found = next(iter(call))
    call.cancel()
    assert found.complete
    assert not any(entry.address for entry in found.entries)
    return {entry.model: entry.state for entry in found.entries}


def test_a_model_on_demand_is_loaded_by_the_first_requests_of_plain_stubs_which_wait(tmp_path: Path) -> None:
    models = file_of_models(tmp_path, **{"team/b": "on-demand: true"})
    with serving(tmp_path, str(models)) as serve, open_channel(serve.address, Link.PUBLIC) as channel:
        stub = SchedulerServiceStub(channel)
        assert states(stub) == {
            "a": pb.SCHEDULER_STATE_SERVING,
            "team/b": pb.SCHEDULER_STATE_AVAILABLE,
            "c:1": pb.SCHEDULER_STATE_SERVING,
        }
        assert "team/b" not in processes(serve, "executor_service")
        request = pb.GenerateRequest(text="x", model="team/b", stop=pb.StopConditions(max_tokens=2))
        asked = pb.GenerateUnaryRequest(request=request)
        calls = [stub.GenerateUnary.future(asked) for _ in range(8)]
        assert [len(call.result().completions) for call in calls] == [1] * 8
        assert set(states(stub).values()) == {pb.SCHEDULER_STATE_SERVING}
        assert len(processes(serve, "executor_service")) == len(SIZES)  # one load for all


def ask(door: str, model: str) -> tuple[int, dict[str, Any]]:
    """What the OpenAI API answers: the status, and the body."""
    asked = {"prompt": "x", "max_tokens": 3, "temperature": 0, "logprobs": 1}
    request = Request(f"{door}/completions", json.dumps(asked | ({"model": model} if model else {})).encode())
    request.add_header("content-type", "application/json")
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


def test_the_openai_door_chooses_the_model_that_a_request_names(tmp_path: Path) -> None:
    models = file_of_models(tmp_path, **{"team/b": "on-demand: true"})
    with serving(tmp_path, str(models), "--openai", "0") as serve:
        (door,) = serve.wait_for(r"OpenAI API at (\S+)")

        answers = {name: ask(door, name) for name in SIZES}
        assert {status for status, _ in answers.values()} == {200}
        assert [answer["model"] for _, answer in answers.values()] == list(SIZES)
        assert len({answer["system_fingerprint"] for _, answer in answers.values()}) == len(SIZES)
        with urlopen(f"{door}/models", timeout=60) as answer:
            assert [one["id"] for one in json.load(answer)["data"]] == list(SIZES)
        with paceline.Client(serve.address) as client:
            assert client.models() == dict.fromkeys(SIZES, "serving")
        status, refused = ask(door, "nobody")
        assert (status, refused["error"]["code"]) == (404, "model_not_found")


def test_the_openai_door_serves_the_others_while_the_first_model_is_gone(tmp_path: Path) -> None:
    models, script = tmp_path / "models.yaml", tmp_path / "script.txt"
    first = f"{{name: first, backend: script, executor: {{script: {script}}}}}"
    models.write_text(f"models: [{first}, {{name: b, executor: {{vocab-size: 300}}}}]\n")
    script.write_text('{"pattern": ".", "text": "hello"}\n')
    with serving(tmp_path, str(models), "--openai", "0") as serve:
        (door,) = serve.wait_for(r"OpenAI API at (\S+)")
        assert [ask(door, name)[0] for name in ("", "first", "b")] == [200, 200, 200]
        script.unlink()
        [executor] = [
            pid
            for pid in family(serve.process.pid)
            if b"--backend\0script\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(executor, signal.SIGKILL)
        serve.wait_for("model first has failed")
        status, answer = ask(door, "b")
        assert (status, answer["model"]) == (200, "b"), answer
        status, answer = ask(door, "")
        assert (status, "model first: failed" in answer["error"]["message"]) == (503, True), answer
        with urlopen(f"{door}/models", timeout=60) as listed:
            found = {one["id"]: one.get("state") for one in json.load(listed)["data"]}
        assert (found["b"], found["first"] in ("failed", "loading")) == (None, True), found


def test_one_token_is_demanded_for_all_models(tmp_path: Path) -> None:
    models = file_of_models(tmp_path)
    with serving(tmp_path, str(models), PACELINE_TOKEN="sesame") as serve:
        with paceline.Client(serve.address, security=Security(token="sesame")) as client:
            assert client.complete("x", max_tokens=2, model="c:1").token_ids
        with paceline.Client(serve.address, security=Security()) as stranger:
            for name in ("a", "nobody"):
                with pytest.raises(errors.Unauthenticated):
                    stranger.complete("x", max_tokens=2, model=name)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.yaml", "b.yaml"], "give either models or one YAML file of models"),
        (["--host", "0.0.0.0", "--insecure"], "several models need tokens there"),
        (["-S", "tls-client-ca=ca.pem"], "-S tls-client-ca: not with several models"),
        (["--draft-backend", "oracle"], "are set in the YAML file of models"),
    ],
)
def test_what_several_models_can_not_have_is_refused_before_anything_starts(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    models = [] if "a.yaml" in arguments else [str(file_of_models(tmp_path))]
    result = run("serve", "--backend", "oracle", *models, *arguments)
    assert (result.returncode, said in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ("[{name: x}, {name: x}]", "two models are called x"),
        ("[{name: '../x'}]", "'../x' can't be a model's name"),
        ("[{nam: x}]", "no field is called 'nam'"),
        ("[{name: x, on-demand: 3}]", "on-demand: expected a bool"),
        ("[]", "expected 1 to 64 models, got 0"),
        ("3", "expected one list"),
    ],
)
def test_a_file_of_models_that_is_wrong_is_refused_by_the_field(
    tmp_path: Path, models: str, said: str
) -> None:
    (tmp_path / "models.yaml").write_text(f"models: {models}\n")
    result = run("serve", "--backend", "oracle", str(tmp_path / "models.yaml"))
    assert (result.returncode, said in result.stderr) == (2, True), result.stderr
