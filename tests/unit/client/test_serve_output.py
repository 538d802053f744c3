"""What `serve` prints where nobody looks at a terminal: plain lines of progress, or JSON alone."""

from __future__ import annotations

import io
import json

from paceline.cli.json_lines import JsonLines, json_lines
from paceline.cli.loading import LoadingLines
from paceline.cli.log_writer import never_blocking
from paceline.cli.several_models.stacks import named_stages
from rich.console import Console


def test_a_line_tells_of_each_stage_and_every_few_seconds_of_a_long_one() -> None:
    now, lines = [0.0], list[str]()
    show = LoadingLines(lines.append, lambda: now[0])
    for at, stage, fraction in [
        (0.0, "loading weights", 0.0),
        (0.1, "loading weights", 0.1),
        (4.9, "loading weights", 0.5),
        (5.0, "loading weights", 0.6),
        (5.1, "loading weights", 0.7),
        (5.2, "grammars", 0.0),
        (10.3, "grammars", 0.0),
    ]:
        now[0] = at
        show(stage, fraction)
    assert lines == [
        "loading weights ...",
        "loading weights ... 5 s, 60% done",
        "grammars ...",
        "grammars ... 5 s",
    ]


def test_models_that_load_at_once_have_lines_of_their_own_and_one_that_loads_again_begins_anew() -> None:
    now, lines = [0.0], list[str]()
    show = LoadingLines(lines.append, lambda: now[0])
    for turn in range(50):
        for name in "ab":
            now[0] = turn / 5
            named_stages(name, show)("loading weights", 0.5)
    now[0] = 60.0
    named_stages("a", show)("loading weights", 0.0)
    assert lines == [
        *(f"{name}: loading weights ..." for name in "ab"),
        *(f"{name}: loading weights ... 5 s, 50% done" for name in "ab"),
        "a: loading weights ...",
    ]


def test_every_line_is_an_object_with_a_time_and_services_keep_their_fields() -> None:
    sink = io.StringIO()
    console = Console(file=sink, width=40)
    with json_lines(console):
        console.print(
            "Serving [bold]x[/] at\nhere, in a line that is longer than the console", soft_wrap=True
        )
        assert isinstance(console.file, JsonLines)
        console.file.pass_on("scheduler", '{"level": "warning", "message": "a", "count": 2}')
        console.file.pass_on("executor", "Traceback (most recent call last):")
        console.file.pass_on("executor", "[1, 2]")
    console.print("after")
    *lines, last = sink.getvalue().splitlines()
    objects = [json.loads(line) for line in lines]
    assert last == "after"
    assert [one["message"] for one in objects] == [
        "Serving x at",
        "here, in a line that is longer than the console",
        "a",
        "Traceback (most recent call last):",
        "[1, 2]",
    ]
    assert objects[2] == {"level": "warning", "message": "a", "count": 2, "service": "scheduler"}
    assert all(one["time"].endswith("Z") and one["logger"] == "paceline.serve" for one in objects[3:])


def test_lines_stay_objects_while_a_thread_writes_them(tmp_path: object) -> None:
    with open(f"{tmp_path}/out", "w+") as file:  # a descriptor, as stderr has
        console = Console(file=file)
        with json_lines(console), never_blocking(console):
            console.print("one")
        file.seek(0)
        assert json.loads(file.read())["message"] == "one"
