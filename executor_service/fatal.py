"""Ends an executor process after an unrecoverable error; the exit status tells a supervisor why."""

from __future__ import annotations

import logging
import os
from typing import NoReturn

from service_kit.logs import Log

from executor_service.contract.model_error import ModelError

log = Log(__name__)

EXIT_FAULT = os.EX_SOFTWARE  # 70: a device fault, a lost rank or a bug; a restart may help
EXIT_MODEL = os.EX_CONFIG  # 78: the model can't be served; a restart helps only if a file was half written


def die(error: BaseException) -> NoReturn:
    """Log the error and end the process at once, from any thread. All caches are lost."""
    if isinstance(error, ModelError):
        log.error(f"the model can't be served: {error}")
        code = EXIT_MODEL
    else:
        log.error("the device thread failed; ending the process", error)
        code = EXIT_FAULT
    logging.shutdown()
    os._exit(code)
