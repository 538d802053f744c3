"""`python -m paceline_router`: one router process, which `paceline serve` starts for several models."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from service_kit import logs
from service_kit.lifecycle import EXIT_PORT, StartError, live
from service_kit.process import limit_collections, new_event_loop

from paceline_router.server import RouterServer, RouterSettings

log = logs.Log(__name__)

_YOUNG_OBJECTS = 10_000  # between two garbage collections


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a router with the settings of the command line; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    settings = RouterSettings.from_command_line(given, "paceline router")
    logs.configure(settings.log_format, settings.log_level)
    limit_collections(_YOUNG_OBJECTS)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            runner.run(live(lambda: RouterServer(settings), settings))
        except StartError as error:
            log.error(f"can't start: {error}")
            return EXIT_PORT
    return 0


if __name__ == "__main__":
    sys.exit(main())
