"""`python -m tests.gpu.random_executor`: an executor process whose model has random weights and no files.

It is `python -m executor_service` but for that; --model names a directory with a config.json.
"""

from __future__ import annotations

import logging
import os
import sys

from executor_service import __main__ as service
from executor_service.backends.torch_backend import backend
from tests.gpu.random_weights import RandomBackend

if __name__ == "__main__":
    backend.TorchBackend = RandomBackend  # type: ignore[misc]  # the factory asks for it by this name
    status = service.main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)
