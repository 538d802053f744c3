"""Steps as Python values, and the timeline that is drawn of them."""

from __future__ import annotations

import asyncio
import json
from io import StringIO
from pathlib import Path

import pytest
from google.protobuf.proto import serialize_length_prefixed
from paceline import Client, errors
from paceline.cli.app import app
from paceline.cli.step_trace import trace
from paceline.cli.timeline_view import MAX_STREAMS, Timeline
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.steps import RequestEvent, Step, read_steps, steps_of
from rich.console import Console
from typer.testing import CliRunner, Result

from tests.unit.client.conftest import Served


def step(number: int, *events: RequestEvent, **figures: object) -> Step:
    """One that was sent at `number` seconds and took 100 ms."""
    values: dict[str, object] = {
        "planned_us": 90_000,
        "taken_us": 100_000,
        "prompt_rows": 0,
        "decode_rows": 2,
        "verify_rows": 0,
        "tokens": 2,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "free_pages": 8,
        "running": 1,
        "waiting": 1,
        "reason": "pages",
        "lost": 0,
        "started_us": number * 1_000_000,
        **figures,
    }
    return Step(number=number, events=events, **values)  # type: ignore[arg-type]


def event(
    kind: str, number: int, value: int = 0, completion: int = 0, request_id: str = "", identity: str = ""
) -> RequestEvent:
    return RequestEvent(kind, number, completion, value, request_id, identity)


def drawn(
    view: Timeline, most: int = 99, *, now_us: int | None = None, width: int = 81, ascii_only: bool = True
) -> list[str]:
    shown = StringIO()
    Console(width=width, file=shown).print(view.picture(width, most, now_us=now_us, ascii_only=ascii_only))
    return [line.rstrip() for line in shown.getvalue().splitlines()]


async def invoked(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, arguments)


@pytest.mark.parametrize("kind", [[], ["--perfetto"]])
async def test_what_was_recorded_before_a_scheduler_died_is_kept(
    served: Served, tmp_path: Path, kind: list[str]
) -> None:
    served.fake.dies, file = True, tmp_path / "steps"
    result = await invoked("steps", "-a", served.address, "--seconds", "9", "-o", str(file), *kind)
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1), result.output
    assert "2 steps, 3 lost" in result.stdout
    found = len([*read_steps(file.read_bytes())]) if not kind else file.read_text().count('"name": "step"')
    assert found == 2
    result = await invoked("steps", "-a", "127.0.0.1:1", "--seconds", "9", "-o", str(file), *kind)
    assert (result.exit_code, file.stat().st_size > 0) == (1, True)  # what was there before
    shown = await invoked("timeline", served.address, "--seconds", "9")
    assert shown.exit_code == 1
    assert "mine" in shown.stdout


@pytest.mark.parametrize("command", [["steps", "-a"], ["timeline", "--seconds", "9"]])
async def test_the_steps_of_one_of_several_models(served: Served, command: list[str]) -> None:
    assert (await invoked(*command, served.address, "--model", "second")).exit_code == 0
    assert served.fake.metadata["paceline-model"] == "second"


async def test_what_cannot_be_recorded_is_refused_at_once(served: Served, tmp_path: Path) -> None:
    for bad in (["-o", str(tmp_path / "no" / "steps")], ["-o", str(tmp_path)], ["--last", "inf"]):
        result = await invoked("steps", "-a", served.address, "--seconds", "9", *bad)
        assert isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code in (1, 2)
    assert not served.fake.metadata  # it was not asked


async def test_clients_get_the_steps_of_a_scheduler(served: Served) -> None:
    """The fake one says of two, after three that were lost."""
    first, second = [one async for one in served.client.steps(last_s=60)]
    assert (first.number, first.lost, first.started_us, first.ended_us) == (7, 3, 1_000_000, 1_004_000)
    assert (second.number, second.lost, second.started_us) == (8, 0, 1_005_000)
    assert (first.reason, first.prompt_rows, first.tokens, second.reason) == ("pages", 1, 9, "")
    assert first.events == (
        RequestEvent("queued", 1, 0, 3, "mine"),
        RequestEvent("admitted", 1, 0, 0, "mine"),
    )
    assert second.events == (RequestEvent("queued", 2, 0, 3), RequestEvent("ended", 1, 0, 4, "mine"))
    assert second.new_tokens == 2

    def blocking() -> list[Step]:
        with Client(served.address) as client:
            return list(client.steps(last_s=60))

    assert await asyncio.to_thread(blocking) == [first, second]


def test_a_message_whose_columns_do_not_fit_together_is_refused() -> None:
    whole = pb.StepLog(started_us=[0], planned_us=[1], taken_us=[1])
    with pytest.raises(errors.InternalError, match="different lengths"):
        list(steps_of(whole))


@pytest.mark.parametrize(
    "content", [b"\xff" * 20, b"\x05abc", b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x02\x08"]
)
def test_a_file_that_is_no_step_log_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"."):
        list(read_steps(content))
    (tmp_path / "file").write_bytes(content)
    result = CliRunner().invoke(app, ["timeline", str(tmp_path / "file")])
    assert result.exit_code == 1
    assert "is no file of `paceline steps`" in result.stderr.replace("\n", " ")


def test_a_stream_is_a_bar_of_what_it_does() -> None:
    view = Timeline(None)
    view.add(step(0, event("queued", 1, 30, request_id="first"), event("queued", 2, 10)))
    view.add(step(1, event("admitted", 1, 20)))
    view.add(step(2, event("preempted", 1, 5), event("admitted", 2)))
    view.add(step(3, event("resumed", 1), event("refused", 2, 13)))
    view.add(step(4))
    *figures, _, first, second = drawn(view)
    assert len(figures) == Timeline.FIGURES - 1
    bar = first.removeprefix("first").strip()
    assert first.startswith("first ")
    assert second.startswith("#2 ")
    assert "".join(dict.fromkeys(bar)) == ".#x"
    assert bar.rstrip().endswith("#"), "it runs on"
    assert "".join(dict.fromkeys(second.removeprefix("#2").strip())) == ".#"
    assert len(second) < len(first), "it has ended"
    told = "\n".join(figures)
    assert "1 sequence, 100% for pages" in told
    assert "8 free, 8 at least" in told
    assert "found 50% of 40" in told
    assert "100.0 ms each (90.0 predicted)" in told


def test_what_a_stream_did_before_it_was_queued_is_drawn_before_that() -> None:
    view, comes = Timeline(None), [event("tokenizing", 1, 500_000), event("grammar_compiling", 1, 1_000_000)]
    steps = [
        step(0),
        step(1),
        step(2, *comes, event("queued", 1, 3, request_id="a")),
        step(3, event("admitted", 1)),
        step(4),
    ]
    for one in steps:
        view.add(one)
    bar = drawn(view)[-1].removeprefix("a").strip()
    assert "".join(dict.fromkeys(bar)) == "-.#"
    assert bar.count("-") == pytest.approx(1.5 * bar.count("."), abs=1)
    bars = {
        one["name"]: (one["ts"], one["dur"])
        for one in json.loads(trace(steps))["traceEvents"]
        if one["ph"] == "X" and one["name"] != "step"
    }
    assert bars == {
        "tokenizing": (600_000, 500_000),
        "grammar_compiling": (1_100_000, 1_000_000),
        "waits": (2_100_000, 1_000_000),
        "runs": (3_100_000, 1_000_000),
    }


@pytest.mark.parametrize(
    ("identity", "request_id", "told"),
    [
        ("alice", "chat-1", "alice chat-1"),
        ("", "0123456789abcdef01234567", "…56789abcdef01234567"),
        ("nightly", "0123456789abcdef01234567", "nightly …def01234567"),
        ("service-for-the-night", "0123456789abcdef01234567", "service-f… …01234567"),
        ("service-for-the-night", "short", "service-for-t… short"),
    ],
)
def test_a_row_keeps_whose_it_is_and_as_much_of_the_ids_end_as_why_takes(
    identity: str, request_id: str, told: str
) -> None:
    view = Timeline(None)
    view.add(step(0, event("queued", 1, request_id=request_id, identity=identity)))
    [row] = drawn(view, ascii_only=False)[Timeline.FIGURES :]
    assert row[:20].rstrip() == told


def test_the_graphs_go_over_the_same_time_as_the_rows() -> None:
    view = Timeline(None)
    view.add(step(0, tokens=8, waiting=4))
    view.add(step(23, tokens=4, waiting=2, taken_us=1_000_000))
    _, tokens, _, waits, *_ = drawn(view)
    assert tokens[7:31] == "@" + 22 * " " + "="
    assert waits[7:31] == 24 * "@", "they have waited until the second step"


def test_only_the_last_seconds_are_shown_and_what_ended_before_is_forgotten() -> None:
    view = Timeline(10.0)
    view.add(step(0, event("queued", 1), event("admitted", 1)))
    view.add(step(1, event("ended", 1), event("queued", 2)))
    for number in range(2, 30):
        view.add(step(number, free_pages=number))
    lines = drawn(view)
    assert [line.split()[0] for line in lines[Timeline.FIGURES :]] == ["#2"]
    assert "29 free, 19 at least" in "\n".join(lines)
    later = "\n".join(drawn(view, now_us=35_000_000))
    assert "none for 6 s" in later, "nothing is computed any more"


def test_of_many_streams_the_latest_are_shown_and_a_bounded_number_is_remembered() -> None:
    view = Timeline(60.0)
    for number in range(MAX_STREAMS + 10):
        view.add(step(0, event("queued", number)))
    lines = drawn(view, most=3, width=120)
    assert [line.split()[0] for line in lines[-3:]] == [f"#{MAX_STREAMS + at}" for at in (7, 8, 9)]
    assert f"{MAX_STREAMS + 7} earlier ones not shown" in "\n".join(lines)


def test_names_in_a_file_are_text_and_no_orders_to_the_terminal(tmp_path: Path) -> None:
    hostile = "\x1b]0;owned\x07[bold]"
    queued = pb.STEP_EVENT_KIND_QUEUED
    log = pb.StepLog(event_kinds=[queued], event_requests=[1], event_indexes=[0], event_values=[3])
    for field in log.DESCRIPTOR.fields[3:16]:  # the columns of steps
        getattr(log, field.name).append(1)
    log.event_counts.append(1)
    log.names.add(number=1, request_id=hostile)
    with (tmp_path / "file").open("wb") as file:
        serialize_length_prefixed(log, file)  # type: ignore[arg-type]
    result = CliRunner().invoke(app, ["timeline", str(tmp_path / "file")])
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert "[bold]" in result.output


async def test_the_command_draws_what_a_scheduler_tells_and_needs_an_end_for_it(served: Served) -> None:
    async def invoked(*words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, ["timeline", served.address, *words])

    shown = await invoked("--seconds", "9")
    assert shown.exit_code == 0, shown.output
    assert "3 lost: this reader was too slow" in " ".join(shown.output.split())
    assert any(line.startswith("mine ") for line in shown.output.splitlines())
    assert (await invoked()).exit_code == 2
