"""A step whose other ranks stand still ends the process, and graphs are freed before the group is left."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.cuda.run.step_event import DeviceEvent
from executor_service.fatal import EXIT_FAULT
from executor_service.steps.forward_watcher import ForwardWatcher

DEVICE = torch.device("cuda:0")
TIMEOUT_S, MARGIN_S = 0.2, 60.0


class _Event:
    """Of a device that has not come to it for the first `asked` questions; None: it never does."""

    asked: int | None = None

    def __init__(self, *, blocking: bool) -> None:
        self._left, self.synchronized = self.asked, False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        if self._left is None:
            return False
        self._left -= 1
        return self._left < 0

    def synchronize(self) -> None:
        self.synchronized = True


@contextmanager
def fake_events(asked: int | None) -> Iterator[None]:
    with (
        mock.patch.object(torch.cuda, "Event", type("Event", (_Event,), {"asked": asked})),
        mock.patch.object(torch.cuda, "device"),
    ):
        yield


def test_the_wait_ends_with_the_event_or_at_the_deadline() -> None:
    with fake_events(asked=3):
        DeviceEvent(DEVICE, MARGIN_S).wait()
    with fake_events(asked=None):
        event = DeviceEvent(DEVICE, TIMEOUT_S)
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"after 0\.2 s: another rank stands still"):
            event.wait()
        assert time.monotonic() - began >= TIMEOUT_S


def test_a_process_alone_waits_without_a_deadline_and_asks_nothing() -> None:
    with fake_events(asked=None):
        event = DeviceEvent(DEVICE, None)
        event.wait()
        assert event._event is not None
        assert event._event.synchronized  # type: ignore[attr-defined]


def test_what_never_ends_on_the_device_ends_the_process() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", __name__], capture_output=True, text=True, timeout=MARGIN_S, check=False
    )
    assert ran.returncode == EXIT_FAULT, ran.stderr
    assert "another rank stands still" in ran.stderr


def test_graphs_are_freed_when_the_backend_is_closed_which_is_before_the_group_is() -> None:
    backend = TorchBackend(mock.Mock())
    backend._runner = runner = mock.Mock()
    backend.close()
    runner.close.assert_called_once_with()


if __name__ == "__main__":
    with fake_events(asked=None):
        watcher = ForwardWatcher(lambda: None)
        watcher.start()
        watcher.watch(DeviceEvent(DEVICE, TIMEOUT_S))  # type: ignore[arg-type]
        time.sleep(MARGIN_S)
