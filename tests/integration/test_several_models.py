"""Several models at one address: each call reaches its model, and one's death leaves the others' streams."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import grpc
import paceline
import pytest
from paceline import errors
from paceline.channel import Link, open_channel
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

from tests.support.openai_door import serving_door
from tests.support.serve import Serve, gone, run, serving

pytestmark = pytest.mark.long

SIZES = {"a": 257, "team/b": 300, "c:1": 400}
"""The models: oracles of these vocabularies, whose tokens differ."""
PROMPT, TOKENS = "the same", 120


def file_of_models(directory: Path) -> Path:
    path = directory / "models.yaml"
    entries = [
        f"  - {{name: '{name}', executor: {{vocab-size: {size}, step-ms: 5}}}}\n"
        for name, size in SIZES.items()
    ]
    path.write_text(f"models:\n{''.join(entries)}")
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


async def test_the_timeline_at_the_openai_apis_port_is_of_the_model_that_the_page_chooses(
    service: Serve,
) -> None:
    async with serving_door(service.address) as door:
        asked = {"model": "c:1", "prompt": "words", "max_tokens": 2}
        answer = await door.ask("/v1/completions", asked)
        assert answer.status == 200, answer.body
        about = (await door.ask("/timeline/about")).json
        assert (about["source"], [name for _, name in about["choices"]]) == ("a", list(SIZES))
        for of, name in about["choices"]:
            steps = (await door.ask(f"/timeline/steps?{urlencode({'after': 0, 'of': of})}")).json
            ids = [one for part in steps["parts"] for _, one, _ in part["names"]]
            assert (answer.json["id"] in ids) == (name == "c:1")
            why = await door.ask(f"/timeline/why?{urlencode({'id': answer.json['id'], 'of': of})}")
            assert why.json["text"].startswith("Ended") == (name == "c:1")
        gone = (await door.ask("/timeline/steps?after=0&of=model:nobody")).json
        assert "'nobody' is not served" in gone["error"]


def test_status_says_that_it_shows_one_of_several_models(service: Serve) -> None:
    first = run("status", "--address", service.address).stdout.splitlines()[0]
    assert all(name in first for name in SIZES)
    assert "--model NAME" in first
    assert "--model NAME" not in run("status", "--address", service.address, "--model", "c:1").stdout


@pytest.mark.parametrize("flags", [[], ["--model", "c:1"]])
def test_why_finds_a_request_at_whichever_model_it_is(service: Serve, flags: list[str]) -> None:
    name = f"of-the-third-{len(flags)}"
    with paceline.Client(service.address) as client:
        client.complete("x", model="c:1", max_tokens=2, request_id=name)
    shown = run("why", name, "--address", service.address, *flags)
    assert shown.returncode == 0, shown.stderr
    assert ("Model c:1:" in shown.stdout) == (not flags)
    assert "Ended" in shown.stdout
    told = json.loads(run("why", name, "--json", "--address", service.address, *flags).stdout)
    assert (told["request_id"], told.get("model")) == (name, None if flags else "c:1")
    other = run("why", name, "--address", service.address, "--model", "a")
    assert (other.returncode, other.stdout) == (1, "")
    assert "No request waits" in run("why", "--slow", "--address", service.address, *flags).stdout


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
