"""`python -m scheduler_service`: one scheduler process."""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports would print where they were

import asyncio
import sys
from collections.abc import Sequence

from service_kit import logs
from service_kit.process import limit_collections, new_event_loop

from scheduler_service.config import SchedulerSettings
from scheduler_service.server import serve

_YOUNG_OBJECTS = 10_000  # between two garbage collections: a call makes a hundred, collecting them takes 5 ms


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a scheduler with the settings of the command line; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    settings = SchedulerSettings.from_command_line(given, "paceline scheduler")
    logs.configure(settings.log_format, settings.log_level)
    limit_collections(_YOUNG_OBJECTS)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
