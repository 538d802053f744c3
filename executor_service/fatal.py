"""How an executor process ends when it can't go on, and the exit status that says why."""

from __future__ import annotations

import logging
import os
from typing import NoReturn

from paceline.service.logs import Log

from executor_service.backends.base import ModelError

log = Log(__name__)

EXIT_FAULT = os.EX_SOFTWARE  # 70: a device fault, a lost rank or a bug; start again
EXIT_MODEL = os.EX_CONFIG  # 78: the model can't be served with this configuration; don't


def die(error: BaseException) -> NoReturn:
    """End the process at once, from any thread; its clients compute again what they need."""
    if isinstance(error, ModelError):
        log.error(f"the model can't be served: {error}")
        code = EXIT_MODEL
    else:
        log.error("the device thread failed; ending the process", error)
        code = EXIT_FAULT
    logging.shutdown()
    os._exit(code)
