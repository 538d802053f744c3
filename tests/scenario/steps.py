"""Takes the scenario's steps with a runner, strikes its schedulers, and judges the outcomes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tests.scenario import affinity
from tests.scenario.matching import differences
from tests.scenario.runner import Runner
from tests.scenario.stage import LIAR, LOADING, STRIKES, TLS, Stage

Step = Mapping[str, Any]
SCENARIO: list[Step] = json.loads(Path(__file__).with_name("scenario.json").read_text())
MAX_TRIES = 5
"""Tries of a step in which what it is to show does not happen. See `Missed`."""

MAX_GROWN_MIB = 256
"""By which a lie may raise a client's peak of memory. A JVM or V8 collects its garbage late."""

LOAD_AFTER_S = 1.0
"""Time after a call at which the model is begun to load for which it waits."""

_FOR_THE_DRIVER = {"at", "tls", "then", "expect", "in_order", "lands", *STRIKES}


class Missed(Exception):
    """What a step is to show did not happen, for no fault of the client's: the machine was slow or frozen.

    A stream ended before its scheduler could be struck, or came in too few messages to be cut twice, or no
    connection was made in time, which clients tell their caller as an error after which to call again.
    """


def take_again(services: Stage, runner: Runner, step: Step) -> tuple[dict[str, Any], list[str]]:
    """`take` until the step shows something, at most `MAX_TRIES` times. Raises RunnerError."""
    complaint = ""
    for _ in range(MAX_TRIES):
        try:
            return take(services, runner, step)
        except Missed as missed:
            complaint = f"{missed}, {MAX_TRIES} times"
    return {}, [complaint]


def take(services: Stage, runner: Runner, step: Step) -> tuple[dict[str, Any], list[str]]:
    """One step: its outcome, and what is wrong about it. Raises Missed and RunnerError."""
    continuations = services.continuations
    peak_mib = runner.peak_mib() if LIAR in step["at"] else 0.0
    taken = [services.requests(name) for name in step["at"]] if "lands" in step else []
    with services.full_queue() if "full" in step["at"] else nullcontext(), _loading(services, step):
        outcome, requests = _run(services, runner, step)
    complaints = list(differences(step["expect"], outcome))
    if taken:
        complaints += _elsewhere(services, step, taken)
    if complaints and _is_unreached(outcome):
        raise Missed(f"no scheduler could be reached: {outcome['error']}")
    if requests and not any(services.requests(name) > count for name, count in requests.items()):
        complaints.append(f"none of {', '.join(requests)} went on with the stream")
    if "cutting" in step["at"] and services.continuations < continuations + 2 and not complaints:
        raise Missed("the stream was not continued twice")
    if LIAR in step["at"] and (grown := runner.peak_mib() - peak_mib) > MAX_GROWN_MIB:
        complaints.append(f"the client took {grown:.0f} MiB")
    if step.get("then") == "idle":
        try:
            services.wait_idle(step["at"])
        except TimeoutError as error:
            complaints.append(str(error))
    return outcome, complaints


def _run(services: Stage, runner: Runner, step: Step) -> tuple[dict[str, Any], dict[str, int]]:
    """The outcome, and after a strike the requests that each remaining scheduler had taken before it."""
    outcome: dict[str, Any] = {}
    requests: dict[str, int] = {}
    missed = False
    for outcome in runner.run(for_runner(services, step)):
        for how in STRIKES:
            if "received" in outcome and how in step:
                before = {name: services.requests(name) for name in step[how]}
                remaining = services.strike(how, step[how])
                missed = remaining is None
                requests = {name: 0 if how == "restart" else before[name] for name in remaining or ()}
    services.thaw()
    if missed:
        raise Missed("the stream ended before its scheduler could be struck")
    return outcome, requests


def _elsewhere(services: Stage, step: Step, taken: Sequence[int]) -> Iterator[str]:
    """A complaint if another scheduler than its affinity's got the request. `taken`: requests before it."""
    found = [services.requests(name) - before for name, before in zip(step["at"], taken, strict=True)]
    index = affinity.first(step, [services.address(name) for name in step["at"]])
    if found != [int(here == index) for here in range(len(found))]:
        yield f"the schedulers took {found} requests, where {step['at'][index]} should have taken the one"


@contextmanager
def _loading(services: Stage, step: Step) -> Iterator[None]:
    """Meanwhile an executor starts, if the step is at the scheduler that waits for one."""
    if LOADING not in step["at"]:
        yield
        return
    timer = threading.Timer(LOAD_AFTER_S, services.load, (LOADING,))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def _is_unreached(outcome: Mapping[str, Any]) -> bool:
    match outcome:
        case {"error": {"code": "UNAVAILABLE", "retryable": True}}:
            return True
    return False


def for_runner(services: Stage, step: Step) -> dict[str, Any]:
    """The step as its runner gets it."""
    found = {name: value for name, value in step.items() if name not in _FOR_THE_DRIVER}
    found["addresses"] = [services.address(name) for name in step["at"]]
    if "in_order" in step:
        found["affinity_key"] = affinity.key_for(found["addresses"])
    if "tls" in step:
        found["ca"] = str(TLS / step["tls"])
    return found
