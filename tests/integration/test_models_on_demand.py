"""Models that are loaded when they are asked for, within a bound of memory, and put away for others."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import paceline
import pytest
from paceline import errors
from paceline.channel import Link, Security, open_channel
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

from tests.support.memory import family, proportional_bytes
from tests.support.serve import Serve, run, serving

BOUND = "795MB"  # of serve, its routers and two of the models
SIZES = {"a": 257, "b": 300, "c": 400}
"""The models: oracles of these vocabularies, whose tokens differ. The first one stays loaded."""


def file_of_models(directory: Path, more: str = "", **fields: str) -> Path:
    path = directory / "models.yaml"
    lines = [
        f"  - {{name: {name}, executor: {{vocab-size: {size}}}{fields.get(name, '')}}}\n"
        for name, size in SIZES.items()
    ]
    path.write_text(f"{more}models:\n{''.join(lines)}")
    return path


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    directory = tmp_path_factory.mktemp("service")
    with serving(directory, str(file_of_models(directory)), "--memory", BOUND) as serve:
        yield serve


def tokens(client: paceline.Client, model: str, count: int = 20) -> tuple[int, ...]:
    answer = client.complete("the same", model=model, max_tokens=count, temperature=0, ignore_eos=True)
    return tuple(answer.token_ids)


def test_calls_of_models_that_do_not_fit_together_all_end_with_their_tokens_within_the_bound(
    service: Serve,
) -> None:
    done, most, loaded = threading.Event(), [0], [0]

    def watch() -> None:
        with paceline.Client(service.address) as client:
            while not done.is_set():
                most.append(proportional_bytes(service.process.pid))
                states = client.models().values()
                loaded.append(sum(state in ("loading", "serving", "draining") for state in states))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with paceline.Client(service.address, failover_timeout_s=300) as client:
            alone = {name: tokens(client, name) for name in SIZES}
            assert len({*alone.values()}) == len(SIZES)
            with ThreadPoolExecutor(6) as threads:
                names = [("a", "b", "b", "c", "c")[number % 5] for number in range(60)]
                found = list(threads.map(lambda name: tokens(client, name), names))
    finally:
        done.set()
        watching.join()
    assert found == [alone[name] for name in names]
    assert max(loaded) == 2
    assert 0 < max(most) < 795e6


def test_a_model_that_can_not_fit_is_refused_by_its_name_before_anything_starts(tmp_path: Path) -> None:
    path = file_of_models(tmp_path, c="").with_name("large.yaml")
    path.write_text(file_of_models(tmp_path).read_text().replace("400}", "400, kv-memory: 1GiB}"))
    result = run("serve", "--backend", "oracle", "--port", "0", str(path), "--memory", BOUND)
    assert result.returncode == 1
    assert "model c needs 1.3" in result.stderr
    assert "Serving" not in result.stderr


def test_an_administrator_loads_and_puts_away_models_and_sees_what_there_is(service: Serve) -> None:
    address = ("--address", service.address)
    assert run("load", "b", *address).stdout == "b is loaded\n"
    assert run("load", "c", *address).stdout == "c is loaded\n"  # b was put away for it
    with paceline.Client(service.address) as client:
        assert client.models() == {"a": "serving", "b": "available", "c": "serving"}
    rows = {
        row["model"]: row
        for line in run("ps", "--json").stdout.splitlines()
        if (row := json.loads(line))["pid"] == service.process.pid
    }
    assert {name: row["state"] for name, row in rows.items()} == {
        "a": "serving",
        "b": "available",
        "c": "serving",
    }
    assert {row["port"] for row in rows.values()} == {int(service.address.rpartition(":")[2])}
    assert len({row["memory_bytes"] for row in rows.values()}) == 1
    assert run("unload", "c", *address).stdout == "c is put away\n"
    assert run("unload", "c", *address).stdout == "c was not loaded\n"
    nobody = run("load", "nobody", *address)
    assert (nobody.returncode, "'nobody' is not served; a, b, c are" in nobody.stderr) == (1, True)


def test_what_has_no_field_for_a_model_does_not_load_one_and_names_it_by_the_client(service: Serve) -> None:
    run("unload", "b", "--address", service.address)
    with paceline.Client(service.address, model="b", failover_timeout_s=0) as client:
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


def test_clients_without_the_right_can_not_load_models(tmp_path: Path) -> None:
    hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("client", "root")}
    people = [
        f"- {{name: {name}, sha256: {digest}, admin: {name == 'root'}}}" for name, digest in hashes.items()
    ]
    (tmp_path / "tokens.yaml").write_text("\n".join(people).lower() + "\n")
    os.chmod(tmp_path / "tokens.yaml", 0o600)
    models = file_of_models(tmp_path, b=", on-demand: true")
    with serving(tmp_path, str(models), "-S", f"tokens-file={tmp_path / 'tokens.yaml'}") as serve:
        with paceline.Client(serve.address, security=Security(token="client")) as client:
            for call in (client.load_model, client.unload_model):
                with pytest.raises(errors.Unauthenticated, match="client is no administrator") as refused:
                    call("b")
                assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED
            assert client.models()["b"] == "available"
        with paceline.Client(serve.address, security=Security(token="root")) as client:
            client.load_model("b")
            assert client.models()["b"] == "serving"


def test_a_model_that_has_failed_says_why_and_is_loaded_once_it_can_be(tmp_path: Path) -> None:
    """Its file is missing at first, and again when its executor has died."""
    script = tmp_path / "script.txt"
    models = file_of_models(tmp_path)
    models.write_text(
        f"{models.read_text()}  - {{name: d, backend: script, executor: {{script: {script}}}}}\n"
    )
    with (
        serving(tmp_path, str(models), "--memory", BOUND) as serve,
        open_channel(serve.address, Link.PUBLIC) as channel,
    ):
        stub = SchedulerServiceStub(channel)
        asked = pb.GenerateUnaryRequest(
            request=pb.GenerateRequest(text="x", model="d", stop=pb.StopConditions(max_tokens=2))
        )
        call = stub.GenerateUnary.future(asked)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert "model d: failed, " in (call.details() or "")
        assert str(script) in (call.details() or "")
        script.write_text('{"pattern": ".", "text": "hello"}\n')
        while (call := stub.GenerateUnary.future(asked)).code() is grpc.StatusCode.UNAVAILABLE:
            assert "model d: failed, " in (call.details() or "")
        assert call.code() is grpc.StatusCode.OK
        script.unlink()
        assert stub.GenerateUnary.future(asked).code() is grpc.StatusCode.OK  # it is loaded
        (executor,) = [
            pid
            for pid in family(serve.process.pid)
            if b"--backend\0script\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(executor, signal.SIGKILL)
        while "model d: failed, " not in ((call := stub.GenerateUnary.future(asked)).details() or ""):
            pass
        assert str(script) in (call.details() or "")
        with paceline.Client(serve.address) as client:
            assert tokens(client, "a")


def test_a_model_is_put_away_when_it_was_not_used_for_its_keep_alive_time(tmp_path: Path) -> None:
    models = file_of_models(tmp_path, more="keep-alive-s: 0.1\n", b=", on-demand: true")
    with serving(tmp_path, str(models)) as serve, open_channel(serve.address, Link.PUBLIC) as channel:
        with paceline.Client(serve.address) as client:
            assert tokens(client, "b")
        seen = []
        for message in SchedulerServiceStub(channel).WatchSchedulers(pb.WatchSchedulersRequest()):
            seen += [entry.state for entry in message.entries if entry.model == "b"]
            if seen[-1] == pb.SCHEDULER_STATE_AVAILABLE:
                break
        with paceline.Client(serve.address) as client:
            assert client.models()["a"] == "serving"  # one that stays


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("keep-alive-s: -1\n", "keep-alive-s: expected seconds above 0, got -1"),
        ("keep-alive-s: yes\n", "keep-alive-s: expected seconds above 0, got True"),
        ("memory: 3\n", "expected one list, `models:`, and perhaps `keep-alive-s:`"),
    ],
)
def test_a_file_with_a_wrong_keep_alive_time_is_refused(tmp_path: Path, more: str, said: str) -> None:
    result = run("serve", "--backend", "oracle", str(file_of_models(tmp_path, more)))
    assert (result.returncode, said in result.stderr) == (2, True), result.stderr


def test_a_bound_that_is_none_is_refused(tmp_path: Path) -> None:
    result = run("serve", "--backend", "oracle", str(file_of_models(tmp_path)), "--memory", "lots")
    assert (result.returncode, "--memory: expected a size like 12GB" in result.stderr) == (2, True)
    result = run("serve", "--backend", "oracle", "--memory", "1GB")
    assert (result.returncode, "--memory is for several models" in result.stderr) == (2, True)
