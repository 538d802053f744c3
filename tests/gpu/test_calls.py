"""Calls chain: each list fits one, all go on with one file, and what was not measured is a failure."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu import __main__ as script
from tests.gpu import hidden_packages, lists
from tests.gpu.bench import Bench, Case, Experiment
from tests.gpu.report import Report
from tests.gpu.runner import Outcome
from tests.support.checkout import ROOT, environment

MACHINE = {"driver": "NVIDIA A, 580, 80 GiB"}
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]


@pytest.mark.parametrize("name", lists.LISTS)
def test_a_list_fits_into_one_call_by_the_limits_of_its_experiments(name: str) -> None:
    assert lists.most_s(lists.names_of(name)) <= lists.CALL_S - lists.SPARE_S == 515


def test_the_lists_have_all_experiments_and_each_begins_with_the_ceilings() -> None:
    listed = lists.names_of(",".join(lists.LISTS))
    assert sorted(listed) == sorted(("device", "kernels", "check", *(f"E{n}" for n in range(13))))
    assert lists.names_of("E5,right")[:4] == ["device", "kernels", "E0", "E5"]
    with pytest.raises(
        ValueError, match=r"no list and no experiment 'E99'; there are right, fast, why, tools, tune,"
    ):
        lists.names_of("E3,E99")


def done(bench: Bench) -> Iterator[Case]:
    yield {"one": 1}


def left_out(bench: Bench) -> Iterator[Case]:
    import no_such_module  # type: ignore[import-not-found]  # noqa: F401

    yield {}


def failing(bench: Bench) -> Iterator[Case]:
    yield {"one": 1}
    raise ValueError("tokens differ")


def partly_failing(bench: Bench) -> Iterator[Case]:
    yield from ({"one": 1}, {"failed": "RuntimeError: one way\n..."})


def killing(bench: Bench) -> Iterator[Case]:
    """Ends the whole call once its first case is in the file."""
    yield {"kept": 1}
    file = Path(os.environ["OUT"]) / "results.json"
    while "kept" not in file.read_text():
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGKILL)
    yield {}


def call(monkeypatch: pytest.MonkeyPatch, name: str, run: Callable[[Bench], Iterator[Case]]) -> int:
    """The script's exit status where this experiment is `run`; without --dry, of a device that is there."""

    def experiment(wanted: str) -> Experiment:
        return Experiment(wanted, "a title", run if wanted == name else done, 60)

    monkeypatch.setattr(lists, "experiment", experiment)
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "--only", name])
    before = signal.getsignal(signal.SIGTERM)
    try:
        return script.main()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("name", ["check", "E3", "E5"])
@pytest.mark.parametrize(
    ("run", "status", "said"),
    [
        (done, 0, "measured        1 cases"),
        (left_out, 1, "left out        0 cases.*not installed: no_such_module"),
        (failing, 1, "failed          1 cases.*ValueError: tokens differ"),
        (partly_failing, 1, "partly failed   2 cases.*a case failed: RuntimeError: one way"),
    ],
)
def test_what_was_not_measured_is_a_failure_and_named_last(
    name: str,
    run: Callable[[Bench], Iterator[Case]],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert call(monkeypatch, name, run) == status
    *_, line, last = capsys.readouterr().out.splitlines()
    assert re.match(f"{name:8} {said}", line)
    wanted = f"NOT MEASURED, or not whole: {name}. Once more: --only {name}" if status else "all was measured"
    assert last == wanted


def test_a_call_that_is_killed_keeps_what_it_had_and_the_next_one_goes_on_with_it(tmp_path: Path) -> None:
    code = (
        "import pytest; from tests.gpu import test_calls as t;t.call(pytest.MonkeyPatch(), 'E3', t.killing)"
    )
    found = environment() | {"OUT": str(tmp_path)}
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=found, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    report = Report(tmp_path, {"driver": ""}, dry=False)
    assert report.found == {name: [{"one": 1}] for name in lists.FIRST} | {"E3": [{"kept": 1}]}
    assert report.outcomes["E3"].status == "ended"
    report.keep("E1", Outcome("a title", "done", cases=[{"two": 2}]))
    data = json.loads((tmp_path / "results.json").read_text())
    assert {name: each["call"] for name, each in data["experiments"].items()} == dict.fromkeys(
        ("device", "kernels", "E0", "E3"), 0
    ) | {"E1": 1}


def test_what_was_measured_before_is_replaced_by_what_is_measured_again_and_kept(tmp_path: Path) -> None:
    for n, status in enumerate(("done", "done", "not started")):
        report = Report(tmp_path, MACHINE, dry=False)
        report.keep("E3", Outcome("a title", status, cases=[{"n": n}]))
    assert report.found == {"E3": [{"n": 1}]}
    [earlier] = json.loads((tmp_path / "results.json").read_text())["earlier"]
    assert (earlier["name"], earlier["cases"], earlier["call"]) == ("E3", [{"n": 0}], 0)


@pytest.mark.parametrize(
    ("before", "why"),
    [
        (json.dumps({"dry": False, "device": "NVIDIA B"}), "of NVIDIA B"),
        (json.dumps({"dry": True, "device": "NVIDIA A"}), "of NVIDIA A, dry"),
        ('{"dry": fal', "JSONDecodeError"),
        ("[]", "TypeError"),
    ],
)
def test_results_of_another_device_are_put_aside(
    before: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.json").write_text(before)
    report = Report(tmp_path, MACHINE, dry=False)
    assert report.outcomes == {}
    assert (tmp_path / "results-1.json").read_text() == before
    assert why in capsys.readouterr().out


def test_a_call_goes_on_with_a_file_of_earlier_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Report(tmp_path / "before", {"driver": ""}, dry=True).keep("E1", Outcome("a title", "done"))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    for _ in range(2):
        arguments = ["tests.gpu", "--earlier", str(tmp_path / "before" / "results.json"), "--only", "E3"]
        monkeypatch.setattr(sys, "argv", arguments)
        if (tmp_path / "out").exists():
            with pytest.raises(SystemExit, match="2"):
                script._arguments()
        else:
            script._arguments()
    assert "has results already" in capsys.readouterr().err
    assert (tmp_path / "out" / "results.json").read_text() == (
        tmp_path / "before" / "results.json"
    ).read_text()


def test_each_wheel_has_one_version_and_needs_nothing_else() -> None:
    wheels = hidden_packages.names_in("wheels.txt")
    pinned = dict(
        line.partition(";")[0].strip().split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    assert wheels <= set(pinned)
    assert hidden_packages.required_by(wheels) == wheels
