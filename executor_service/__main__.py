"""`python -m executor_service`: one executor process."""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports would print where they were

import asyncio
import logging
import os
import sys
import threading

from service_kit import logs
from service_kit.lifecycle import EXIT_PORT, StartError, live
from service_kit.process import limit_collections, new_event_loop

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.factory import follow, follower_rank
from executor_service.backends.torch_backend.settings import TorchSettings
from executor_service.config import ExecutorConfig
from executor_service.fatal import EXIT_MODEL
from executor_service.grammar.source import STACK_BYTES
from executor_service.server import ExecutorServer

_SWITCH_S = 0.0005  # seconds after which the device thread hands the interpreter lock to the event loop
_YOUNG_OBJECTS = 50_000  # between two garbage collections: a step makes thousands, without cycles
log = logs.Log("executor_service")


def main() -> int:
    """Parse the command line and serve. Returns the exit status."""
    config = ExecutorConfig.from_command_line(sys.argv[1:], "paceline executor")
    logs.configure(config.log_format, config.log_level)
    sys.setswitchinterval(_SWITCH_S)
    threading.stack_size(STACK_BYTES)  # what is not used takes no memory
    limit_collections(_YOUNG_OBJECTS)
    try:
        if config.backend == "torch":
            settings = TorchSettings.of(config)
            if (rank := follower_rank(settings)) is not None:
                follow(settings, rank, exit_with_stdin=config.exit_with_stdin)
                return 0
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(live(lambda: ExecutorServer(config), config))
    except ModelError as error:
        log.error(f"the model can't be served: {error}")
        return EXIT_MODEL
    except StartError as error:
        log.error(f"can't start: {error}")
        return EXIT_PORT
    return 0


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    # Not sys.exit: the device thread may still be in a load or a step whose result is not needed.
    os._exit(status)
