"""`python -m executor_service`: one executor process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys

import pydantic
import pydantic_settings
import yaml

from executor_service import logs
from executor_service.backends.base import ModelError
from executor_service.config import explain, parse
from executor_service.server import EXIT_PORT, StartError, run
from executor_service.worker import EXIT_MODEL

EXIT_USAGE = os.EX_USAGE  # 64: a flag, a variable or the YAML is wrong
_SWITCH_S = 0.0005  # the event loop gets the interpreter back from the device thread this fast
_GC_YOUNG = 50_000  # a step makes thousands of short-lived objects, and no cycles


def main() -> int:
    """Parse, serve, and say with the exit status why it ended."""
    try:
        config = parse(sys.argv[1:])
    except pydantic.ValidationError as error:
        print(explain(error.errors()), file=sys.stderr)
        return EXIT_USAGE
    except (pydantic_settings.SettingsError, yaml.YAMLError) as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    as_json = config.log_format == "json" or (config.log_format == "auto" and not sys.stderr.isatty())
    logs.configure(config.log_level, as_json=as_json)
    log = logs.get_logger("executor_service")
    sys.setswitchinterval(_SWITCH_S)
    gc.set_threshold(_GC_YOUNG)
    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(run(config))
    except ModelError as error:
        log.critical("the model can't be served", extra={"error": str(error)})
        return EXIT_MODEL
    except StartError as error:
        log.critical("can't start", extra={"error": str(error)})
        return EXIT_PORT
    return 0


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it can be installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    # Not sys.exit: the device thread may be deep in a load or a step that nobody waits for any more.
    os._exit(status)
