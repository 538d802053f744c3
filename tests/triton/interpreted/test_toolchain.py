"""Where Triton can't launch kernels, the executor says what is missing before it loads a model."""

from __future__ import annotations

from typing import Any

import pytest
import triton

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.cuda.launch.toolchain import check_toolchain


class Driver:
    """Triton's driver, which builds its code when it is first used."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    @property
    def active(self) -> Any:
        if self._error is not None:
            raise self._error
        return self

    def get_current_target(self) -> str:
        return "cuda"


@pytest.mark.parametrize(
    ("compiler", "message"),
    [("", "needs a C compiler .* CC"), ("gcc", "headers of Python: no Python.h")],
)
def test_what_is_missing_is_named(compiler: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(triton.runtime, "driver", Driver(RuntimeError("no Python.h")))
    with pytest.raises(ModelError, match=message):
        check_toolchain()


def test_a_driver_that_works_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime, "driver", Driver(None))
    check_toolchain()
