"""`python -m executor_service.memory_forecast`: what executors will take of memory, before any is started.

Each line of standard input is the command line of one, as a list in JSON; each is answered by a line with its
`bytes`, or with the `problem` for which it could not serve. Only headers of models' files are read.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.settings import TorchSettings
from executor_service.config import ExecutorConfig

_BASE_BYTES = 112 << 20
"""Of an executor without a model in files; what a plugin's takes beyond that is not known."""


def planned_bytes(config: ExecutorConfig) -> int:
    """The most host memory of an executor, all its processes together. Raises ModelError."""
    adapters = config.adapter_memory if config.adapter_dir is not None else 0
    if config.backend != "torch":
        return _BASE_BYTES + (config.kv_memory or 0) + adapters
    from executor_service.backends.torch_backend.factory import torch_config
    from executor_service.backends.torch_backend.memory import planned_bytes as of_model

    try:
        whole = torch_config(TorchSettings.of(config))
    except ValueError as error:
        raise ModelError(str(error)) from error
    # Each rank may have all of it, which is more than their parts.
    return (
        config.tensor_parallel * of_model(whole, config.kv_memory, config.pages, config.page_size) + adapters
    )


def answer(arguments: Sequence[str]) -> dict[str, object]:
    """One line's answer."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return {"bytes": planned_bytes(ExecutorConfig.from_command_line(arguments, "paceline executor"))}
    except ModelError as error:
        return {"problem": str(error)}
    except SystemExit:
        return {"problem": said.getvalue().strip().replace("\n", "; ")}


def main() -> None:
    """Answer every line."""
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
