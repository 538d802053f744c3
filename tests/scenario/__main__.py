"""`python -m tests.scenario LANGUAGE...`: exits with 1 unless each step of each language is as expected."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.scenario.matching import differences
from tests.scenario.runner import COMMANDS, Runner, RunnerError, runner
from tests.scenario.stage import STRIKES, TLS, Stage, stage

Step = Mapping[str, Any]
SCENARIO: list[Step] = json.loads(Path(__file__).with_name("scenario.json").read_text())
_FOR_THE_DRIVER = {"at", "tls", "then", "expect", *STRIKES}


def main() -> int:
    """Run the scenario with each language; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.scenario", description=__doc__)
    parser.add_argument("languages", nargs="+", choices=sorted(COMMANDS))
    parser.add_argument("--show", action="store_true", help="print each step's time and outcome")
    arguments = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as directory, stage(Path(directory)) as services:
        for language in arguments.languages:
            began = time.monotonic()
            found = play(services, language, show=arguments.show)
            failures += len(found)
            took_s = time.monotonic() - began
            print(f"{language}: {len(SCENARIO)} steps, {len(found)} failures, {took_s:.1f} s")
            for failure in found:
                print(f"  {failure}")
            sys.stdout.flush()
    return 1 if failures else 0


def play(services: Stage, language: str, *, show: bool = False) -> list[str]:
    """Run all steps with the runner of one language; what went wrong, in words."""
    failures = []
    name = "the start"
    with services.mortals(), services.full_queue():
        try:
            with runner(language) as runs:
                for step in SCENARIO:
                    began, name = time.monotonic(), step["name"]
                    outcome, complaints = take(services, runs, step)
                    failures += [f"{name}: {complaint}" for complaint in complaints]
                    if show:
                        took_s = round(time.monotonic() - began, 1)
                        print(json.dumps({"step": name, "took_s": took_s, **outcome}))
        except RunnerError as error:
            failures.append(f"{name}: {error}")
    return failures


def take(services: Stage, runs: Runner, step: Step) -> tuple[dict[str, Any], list[str]]:
    """One step: its outcome, and what is wrong about it. Raises RunnerError."""
    outcome: dict[str, Any] = {}
    requests: dict[str, int] = {}  # taken so far by the schedulers that remain after a strike
    complaints: list[str] = []
    continuations = services.continuations
    for outcome in runs.run(for_runner(services, step)):
        for how in STRIKES:
            if "received" in outcome and how in step:
                before = {name: services.requests(name) for name in step[how]}
                try:
                    remaining = services.strike(how, step[how])
                except AssertionError as error:
                    complaints.append(str(error))
                else:
                    requests = {name: 0 if how == "restart" else before[name] for name in remaining}
    services.thaw()
    complaints += differences(step["expect"], outcome)
    if requests and not any(services.requests(name) > count for name, count in requests.items()):
        complaints.append(f"none of {', '.join(requests)} went on with the stream")
    if "cutting" in step["at"] and services.continuations < continuations + 2:
        complaints.append("the stream was not continued twice")
    if step.get("then") == "idle":
        try:
            services.wait_idle(step["at"])
        except AssertionError as error:
            complaints.append(str(error))
    return outcome, complaints


def for_runner(services: Stage, step: Step) -> dict[str, Any]:
    """The step as its runner gets it."""
    found = {name: value for name, value in step.items() if name not in _FOR_THE_DRIVER}
    found["addresses"] = [services.address(name) for name in step["at"]]
    if "tls" in step:
        found["ca"] = str(TLS / step["tls"])
    return found


if __name__ == "__main__":
    sys.exit(main())
