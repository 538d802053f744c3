"""Shows the loading of a model: a bar on a terminal, else lines. Waits for it, in commands that need one."""

from __future__ import annotations

import concurrent.futures
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from paceline import errors
from paceline.channel import is_loopback
from paceline.cli.common import stderr
from paceline.cli.scratch import starting
from paceline.cli.stack import Loading
from paceline.client import Client
from paceline.failover import FAILOVER_TIMEOUT_S
from paceline.types import Status

_INTERVAL_S = 5.0
_OVER_S = 15.0  # a stage that is reported after this time without a report is that of another load
_POLL_S = 0.2
_RECONNECT_S = 3.0  # the channel waits for up to 0.5 s between two tries
_STATUS_TIMEOUT_S = 5.0
_PROGRESS = re.compile(r"(.*) \((\d+)%\)")
"""What ListExecutors says of an executor that is loading."""


@dataclass(slots=True)
class _Stage:
    """When a stage began, was last printed and last reported."""

    began_at: float
    shown_at: float
    seen_at: float


class LoadingLines:
    """Prints a line when a stage begins, and every _INTERVAL_S seconds of one that lasts.

    Stages of several models, which load at once, are told apart by what stands before a colon. The stages of
    a load follow each other: one that comes after a later one is that of another load.
    """

    def __init__(self, show: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._show, self._clock = show, clock
        self._stages: dict[str, _Stage] = {}

    def __call__(self, stage: str, fraction: float) -> None:
        """Report the stage, and the fraction of it that is done, 0 to 1."""
        now = self._clock()
        known = self._stages.get(stage)
        model = stage.rpartition(": ")[0]
        of_model = [one for name, one in self._stages.items() if name.rpartition(": ")[0] == model]
        last = max((one.seen_at for one in of_model), default=now)
        if known is None or now - known.seen_at > _OVER_S or last > known.seen_at:
            self._stages[stage] = _Stage(now, now, now)
            self._show(f"{stage} ...")
            return
        known.seen_at = now
        if now - known.shown_at >= _INTERVAL_S:
            known.shown_at = now
            done = f", {fraction:.0%} done" if fraction else ""  # some stages do not tell
            self._show(f"{stage} ... {now - known.began_at:.0f} s{done}")


@contextmanager
def loading_bar() -> Iterator[Loading]:
    """A context manager: shows the executor's loading on stderr, on a terminal as a bar, else as lines."""
    if not stderr.is_terminal:
        yield LoadingLines(
            lambda line: stderr.print(line, markup=False, highlight=False, soft_wrap=True), time.monotonic
        )
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True) as bars:
        bar = bars.add_task("starting", total=1.0)
        yield lambda what, fraction: bars.update(bar, description=what, completed=fraction)


def wait_for_model(client: Client) -> None:
    """Wait for a model that is loading, and show how far it is; the scheduler says when it serves.

    Waits as long as the client's calls do by themselves, and before for a scheduler of this machine that a
    `paceline serve` of this user is starting. Raises PacelineError.
    """
    status = _first_status(client)
    if status is None or status.state != "loading":
        return
    with loading_bar() as show, concurrent.futures.ThreadPoolExecutor(1) as thread:
        served = thread.submit(client.model_info)
        try:
            while not served.done():
                show(*_progress(client))
                concurrent.futures.wait([served], _POLL_S)
        except BaseException:
            client.close()  # ends the call
            raise
        served.result()


def _first_status(client: Client) -> Status | None:
    """The scheduler's status, as soon as it listens if it may be one that starts. Raises PacelineError.

    None: the first of several models is not there yet. It may be another one that is called, and calls wait.
    """
    on_this_machine = all(map(is_loopback, client.addresses))
    until, last = 0.0, time.monotonic() + FAILOVER_TIMEOUT_S
    with ExitStack() as shown:
        show: Loading | None = None
        while True:
            if begins := starting() if on_this_machine else []:
                until = min(time.monotonic() + _RECONNECT_S, last)
            try:
                return client.status(timeout_s=_STATUS_TIMEOUT_S)
            except errors.Unavailable as error:
                if error.reason:
                    return None
                if time.monotonic() >= until:
                    raise
            if begins:
                show = show or shown.enter_context(loading_bar())
                show(f"waiting for process {begins[0]}, which is starting", 0.0)
            time.sleep(_POLL_S)


def _progress(client: Client) -> tuple[str, float]:
    """What an executor is loading, and the fraction that is done; only administrators see it."""
    try:
        details = [one.detail for one in client.executors(timeout_s=_STATUS_TIMEOUT_S) if not one.connected]
    except errors.PacelineError:
        details = []
    reports = [found for detail in details if (found := _PROGRESS.fullmatch(detail))]
    return (reports[0][1], int(reports[0][2]) / 100) if reports else ("waiting for the model", 0.0)
