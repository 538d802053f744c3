"""Models that are loaded when they are asked for, within a bound of memory, and put away for others."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import grpc
import paceline
import pytest
from paceline import errors
from paceline.channel import Link, Security, open_channel
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

from tests.support.memory import family, proportional_bytes
from tests.support.serve import Serve, completion, run, serving

pytestmark = pytest.mark.long

BOUND = 913_000_000  # bytes, of serve, its routers, the gateway and two of the models
SIZES = {"a": 257, "b": 300, "c": 400, "brief": 500}
"""The models: oracles of these vocabularies, whose tokens differ. The first one stays loaded."""


def file_of_models(directory: Path, names: Sequence[str] = tuple(SIZES), **fields: str) -> Path:
    path = directory / "models.yaml"
    lines = [
        f"  - {{name: {name}, executor: {{vocab-size: {SIZES[name]}}}{fields.get(name, '')}}}\n"
        for name in names
    ]
    path.write_text(f"models:\n{''.join(lines)}")
    return path


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    directory = tmp_path_factory.mktemp("service")
    models = file_of_models(directory, brief=", keep-alive-s: 0.1")
    with serving(directory, str(models), "--memory", f"{BOUND}", "--openai", "0") as serve:
        yield serve


def tokens(client: paceline.Client, model: str, count: int = 20) -> tuple[int, ...]:
    answer = client.complete("the same", model=model, max_tokens=count, temperature=0, ignore_eos=True)
    return tuple(answer.token_ids)


def executors(serve: Serve, model: str) -> int:
    """How many processes of executors a model has."""
    mark = f"--vocab-size={SIZES[model]}\0".encode()
    return sum(mark in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family(serve.process.pid))


def states(stub: SchedulerServiceStub) -> dict[str, int]:
    """The models' states, as the directory lists them."""
    call = stub.WatchSchedulers(pb.WatchSchedulersRequest())
    found = next(iter(call))
    call.cancel()
    assert found.complete
    assert not any(entry.address for entry in found.entries)
    return {entry.model: entry.state for entry in found.entries}


def test_the_openai_door_chooses_the_model_that_a_request_names(service: Serve) -> None:
    (door,) = service.wait_for(r"OpenAI API at ([^\s,]+)")
    service.wait_for(rf"Try: paceline ps; paceline generate --address {service.address} --model a ")
    answers = {name: completion(door, name) for name in ("a", "b")}  # it has the second one loaded
    assert {status for status, _ in answers.values()} == {200}
    assert [answer["model"] for _, answer in answers.values()] == ["a", "b"]
    assert len({answer["system_fingerprint"] for _, answer in answers.values()}) == 2
    with urlopen(f"{door}/models", timeout=60) as answer:
        assert [one["id"] for one in json.load(answer)["data"]] == list(SIZES)
    status, refused = completion(door, "nobody")
    assert (status, refused["error"]["code"]) == (404, "model_not_found")


def test_a_model_on_demand_is_loaded_by_the_first_requests_of_plain_stubs_which_wait(service: Serve) -> None:
    with paceline.Client(service.address) as client:
        client.unload_model("c")
    with open_channel(service.address, Link.PUBLIC) as channel:
        stub = SchedulerServiceStub(channel)
        found = states(stub)
        assert (found["a"], found["c"]) == (pb.SCHEDULER_STATE_SERVING, pb.SCHEDULER_STATE_AVAILABLE)
        assert (executors(service, "a"), executors(service, "c")) == (1, 0)
        request = pb.GenerateRequest(text="x", model="c", stop=pb.StopConditions(max_tokens=2))
        asked = pb.GenerateUnaryRequest(request=request)
        calls = [stub.GenerateUnary.future(asked) for _ in range(8)]
        assert [len(call.result().completions) for call in calls] == [1] * 8
        assert states(stub)["c"] == pb.SCHEDULER_STATE_SERVING
        assert executors(service, "c") == 1  # one load for all


def test_calls_of_models_that_do_not_fit_together_all_end_with_their_tokens_within_the_bound(
    service: Serve,
) -> None:
    done, most, loaded = threading.Event(), [0], [0]

    def watch() -> None:
        with paceline.Client(service.address) as client:
            while not done.is_set():
                most.append(proportional_bytes(service.process.pid))
                loaded.append(sum(is_loaded(client.models()).values()))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with (
            paceline.Client(service.address, failover_timeout_s=300) as client,
            ThreadPoolExecutor(6) as threads,
        ):
            names = [("a", "b", "b", "c", "c")[number % 5] for number in range(15)]
            found = list(threads.map(lambda name: tokens(client, name), names))
            alone = {name: tokens(client, name) for name in ("a", "b", "c")}
    finally:
        done.set()
        watching.join()
    assert len({*alone.values()}) == len(alone)
    assert found == [alone[name] for name in names]
    assert max(loaded) == 2
    assert 0 < max(most) < BOUND


def is_loaded(states: Mapping[str, str]) -> dict[str, bool]:
    """Whether models have processes."""
    return {name: state in ("loading", "serving", "draining") for name, state in states.items()}


def test_a_model_that_can_not_fit_is_refused_by_its_name_before_anything_starts(tmp_path: Path) -> None:
    models = file_of_models(tmp_path, c=", scheduler: {}")
    models.write_text(models.read_text().replace("400}", "400, kv-memory: 1GiB}"))
    result = run("serve", "--backend", "oracle", "--port", "0", str(models), "--memory", f"{BOUND}")
    assert result.returncode == 1
    assert "model c needs 1.3" in result.stderr
    assert "Serving" not in result.stderr


def test_an_administrator_loads_and_puts_away_models_and_sees_what_there_is(service: Serve) -> None:
    address = ("--address", service.address)
    assert run("load", "b", *address).stdout == "b is loaded\n"
    assert run("load", "c", *address).stdout == "c is loaded\n"  # b was put away for it
    expected = dict.fromkeys(SIZES, "available") | {"a": "serving", "c": "serving"}
    with paceline.Client(service.address) as client:
        assert client.models() == expected
    rows = {
        row["model"]: row
        for line in run("ps", "--json").stdout.splitlines()
        if (row := json.loads(line))["pid"] == service.process.pid
    }
    assert {name: row["state"] for name, row in rows.items()} == expected
    assert {row["port"] for row in rows.values()} == {int(service.address.rpartition(":")[2])}
    assert len({row["memory_bytes"] for row in rows.values()}) == 1
    assert run("unload", "c", *address).stdout == "c is put away\n"
    assert run("unload", "c", *address).stdout == "c was not loaded\n"
    nobody = run("load", "nobody", *address)
    assert (nobody.returncode, "'nobody' is not served; a, b, c, " in nobody.stderr) == (1, True)


def test_what_has_no_field_for_a_model_does_not_load_one_and_names_it_by_the_client(service: Serve) -> None:
    with paceline.Client(service.address, model="b", failover_timeout_s=0) as client:
        client.unload_model("b")
        with pytest.raises(errors.RetryLater, match="model b: available"):
            client.status()
        assert client.models()["b"] == "available"
        assert client.complete("x", max_tokens=2).token_ids
        assert client.status().requests >= 1
        assert client.model_info().name == "b"
    said = run("status", "--json", "--model", "b", "--address", service.address)
    assert json.loads(said.stdout)["model"]["name"] == "b"
    assert "b answered" in run("doctor", "--model", "b", service.address).stdout
    unknown = run("why", "no-such-id", "--model", "b", "--address", service.address)
    assert "no-such-id is not known" in unknown.stderr


def test_a_model_is_put_away_when_it_was_not_used_for_its_keep_alive_time(service: Serve) -> None:
    with paceline.Client(service.address) as client, open_channel(service.address, Link.PUBLIC) as channel:
        assert tokens(client, "brief")
        for message in SchedulerServiceStub(channel).WatchSchedulers(pb.WatchSchedulersRequest()):
            states = [entry.state for entry in message.entries if entry.model == "brief"]
            if states and states[-1] == pb.SCHEDULER_STATE_AVAILABLE:
                break
        assert client.models()["a"] == "serving"  # one that stays


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Who calls must have a token: "sesame", or that of the administrator, "root"."""
    directory = tmp_path_factory.mktemp("guarded")
    root = hashlib.sha256(b"root").hexdigest()
    (directory / "tokens.yaml").write_text(f"- {{name: root, sha256: {root}, admin: true}}\n")
    os.chmod(directory / "tokens.yaml", 0o600)
    models = file_of_models(directory, ("a", "b"), b=", on-demand: true")
    tokens_file = f"tokens-file={directory / 'tokens.yaml'}"
    with serving(directory, str(models), "-S", tokens_file, PACELINE_TOKEN="sesame") as serve:
        yield serve


def test_clients_without_the_right_can_not_load_models(guarded: Serve) -> None:
    with paceline.Client(guarded.address, security=Security(token="sesame")) as client:
        for call in (client.load_model, client.unload_model):
            with pytest.raises(errors.Unauthenticated, match="client is no administrator") as refused:
                call("b")
            assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED
        assert client.models()["b"] == "available"
    with paceline.Client(guarded.address, security=Security(token="root")) as client:
        client.load_model("b")
        assert client.models()["b"] == "serving"


def test_one_token_is_demanded_for_all_models(guarded: Serve) -> None:
    with paceline.Client(guarded.address, security=Security(token="sesame")) as client:
        assert client.complete("x", max_tokens=2, model="b").token_ids
    with paceline.Client(guarded.address, security=Security()) as stranger:
        for name in ("a", "nobody"):
            with pytest.raises(errors.Unauthenticated):
                stranger.complete("x", max_tokens=2, model=name)


def test_a_bound_that_is_none_is_refused(tmp_path: Path) -> None:
    result = run("serve", "--backend", "oracle", str(file_of_models(tmp_path)), "--memory", "lots")
    assert (result.returncode, "--memory: expected a size like 12GB" in result.stderr) == (2, True)
    result = run("serve", "--backend", "oracle", "--memory", "1GB")
    assert (result.returncode, "--memory is for several models" in result.stderr) == (2, True)
