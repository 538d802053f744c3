"""Runs an experiment in a process of its own: what breaks or hangs there costs nobody else.

A fault on a CUDA device leaves its process without it, so each experiment is forked from this one, which
never touches the device; cases come back one by one, and what came back before an end stays.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from tests.gpu.bench import Bench, Case, Experiment


@dataclass
class Outcome:
    """What came of an experiment."""

    title: str
    status: str  # "running", "done", "failed", "ended" (too long), "left out" (not installed), "not started"
    seconds: float = 0.0
    cases: list[Case] = field(default_factory=list)
    error: str = ""

    @property
    def measured(self) -> bool:
        """Whether all of it was."""
        return self.status == "done" and not self.failures

    @property
    def failures(self) -> list[str]:
        """What failed of an experiment that went on without it, a line each."""
        return [str(case["failed"]).strip().splitlines()[0] for case in self.cases if "failed" in case]

    @property
    def skipped(self) -> list[str]:
        """What an experiment passed over, a line for each reason."""
        found: dict[str, list[str]] = {}
        for case in self.cases:
            for key in {"skipped", "profile_failed"} & set(case):
                found.setdefault(str(case[key]), []).append(_subject(case))
        return [f"{reason} ({'; '.join(dict.fromkeys(of))})" for reason, of in found.items()]

    def plain(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)

    def line(self) -> str:
        """The last line of the error, if any."""
        return self.error.strip().splitlines()[-1][:300] if self.error.strip() else ""


def _subject(case: Case) -> str:
    return " ".join(
        str(case[key]) for key in ("family", "shape", "way", "kind", "compared", "rows") if key in case
    )


def run(
    experiment: Experiment,
    bench: Bench,
    most_s: float,
    keep: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Run it for at most so long. `keep` gets what there is at its start and after each case."""
    fork = get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_child, args=(experiment, bench, sender), name=experiment.name)
    began = time.monotonic()
    process.start()
    sender.close()
    outcome = Outcome(experiment.title, "running")
    try:
        keep(outcome)
        _collect(receiver, outcome, began, began + most_s, keep)
    finally:
        _end(process.pid)
        process.join()
    if outcome.status == "running":  # it died
        outcome.status = "failed"
        outcome.error = f"the process ended with exit code {process.exitcode}"
    if outcome.status == "ended":
        outcome.error = f"ended after {most_s:.0f} s"
    outcome.seconds = time.monotonic() - began
    return outcome


def _collect(
    receiver: Connection, outcome: Outcome, began: float, deadline: float, keep: Callable[[Outcome], None]
) -> None:
    while receiver.poll(max(deadline - time.monotonic(), 0)):
        try:
            kind, value = receiver.recv()
        except EOFError:
            return
        if kind == "case":
            outcome.cases.append(value)
            outcome.seconds = time.monotonic() - began
            keep(outcome)
        else:
            outcome.status, outcome.error = kind, value
            return
    outcome.status = "ended"


def _end(pid: int | None) -> None:
    """The process and all it started, a group of their own. It is not reaped yet, so the id is its."""
    assert pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # not yet a group
        os.kill(pid, signal.SIGKILL)


def _child(experiment: Experiment, bench: Bench, sender: Connection) -> None:
    os.setpgrp()  # no session of its own: who ends the call's session ends this too
    if bench.threads:
        torch.set_num_threads(bench.threads)
    try:
        for case in experiment.run(bench):
            sender.send(("case", case))
        sender.send(("done", ""))
    except ModuleNotFoundError as error:
        sender.send(("left out", f"not installed: {error.name}"))
    except BaseException:
        sender.send(("failed", traceback.format_exc()))
