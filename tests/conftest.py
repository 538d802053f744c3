"""For all tests."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator

import pytest
from hypothesis import settings

# A background job of a shell ignores these, and the services that tests start and signal would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes says how busy the machine is, not whether the code is right.
# The default run is the same for everybody; --hypothesis-profile explore looks further.
settings.register_profile("paceline", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("explore", deadline=None, derandomize=False)
settings.load_profile("paceline")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Spare the garbage collector the million objects that are imported and collected here, and stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
