"""Shows the loading of a model: a bar on a terminal, else lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from paceline.cli.common import stderr
from paceline.cli.stack import Loading

_INTERVAL_S = 5.0


class LoadingLines:
    """Prints a line when another stage begins, and every _INTERVAL_S seconds of one that lasts."""

    def __init__(self, show: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._show, self._clock = show, clock
        self._stage, self._began_at, self._shown_at = "", clock(), clock()

    def __call__(self, stage: str, fraction: float) -> None:
        """Report the stage, and the fraction of it that is done, 0 to 1."""
        now = self._clock()
        if stage != self._stage:
            self._stage, self._began_at = stage, now
            self._show(f"{stage} ...")
        elif now - self._shown_at >= _INTERVAL_S:
            done = f", {fraction:.0%} done" if fraction else ""  # some stages do not tell
            self._show(f"{stage} ... {now - self._began_at:.0f} s{done}")
        else:
            return
        self._shown_at = now


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
