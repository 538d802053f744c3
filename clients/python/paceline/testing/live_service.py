"""`LiveService`: an executor without a model and a scheduler, as processes, for the time of some tests."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Self

from paceline import aio, errors
from paceline.channel import Security
from paceline.client import Client
from paceline.extras import installation
from paceline.testing.live_config import LiveConfig
from paceline.testing.service_process import LoopbackProcess

_POLL_S = 0.01
_CALL_TIMEOUT_S = 5.0
_INSTALL = f"the services need more packages than the client; {installation('testing')}"


class LiveServiceError(Exception):
    """The service did not start, or one of its processes died; the message has the end of its log."""


class LiveService:
    """A scheduler and an executor on free ports of this machine. Use as a context manager.

        with LiveService(LiveConfig(script="answers.jsonl")) as service, service.client() as client:
            ...

    Both processes end with this one, however it ends. Any process of this machine may call them: they hold no
    data but the tests'. Variables PACELINE_* of the environment do not change them.
    """

    def __init__(self, config: LiveConfig | None = None) -> None:
        self.config = config or LiveConfig()
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[LoopbackProcess] = []  # executor, scheduler

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start both processes, and wait until they serve. Raises LiveServiceError."""
        if self._directory is not None:
            raise LiveServiceError("the service was started before")
        self._directory = tempfile.TemporaryDirectory(prefix="paceline-")
        try:
            self._launch(Path(self._directory.name))
            self._wait()
        except BaseException:
            self._end()
            raise

    def stop(self) -> None:
        """End both processes. Raises LiveServiceError if one had died before, so that this is noticed."""
        died = "\n".join(process.end for process in self._processes if process.end)
        self._end()
        if died:
            raise LiveServiceError(f"while the tests ran, {died}")

    @property
    def address(self) -> str:
        """The scheduler's host:port."""
        return f"127.0.0.1:{self._processes[1].port}"

    @property
    def executor_address(self) -> str:
        """The executor's host:port."""
        return f"127.0.0.1:{self._processes[0].port}"

    @property
    def log(self) -> str:
        """All that both have written."""
        return "".join(process.log for process in self._processes)

    def client(self) -> Client:
        """A new blocking client of the scheduler; the caller closes it."""
        return Client(self.address, security=self._security)

    def aio_client(self) -> aio.Client:
        """A new asyncio client of the scheduler; the caller closes it. Call this in the event loop."""
        return aio.Client(self.address, security=self._security)

    @property
    def _security(self) -> Security | None:
        return Security(token=self.config.token) if self.config.token else None

    def _launch(self, directory: Path) -> None:
        # Through its socket, the scheduler connects to the executor before that has a port.
        socket = directory / "executor.socket"
        quiet = ["--log-level=warning", "--log-format=console", "--drain-timeout-s=0"]
        executor = [*quiet, f"--local-socket={socket}", *self.config.executor_flags(directory)]
        scheduler = [*quiet, f"--executor=unix:{socket}", *self.config.scheduler_flags()]
        self._processes.append(LoopbackProcess("executor_service", directory, executor))
        self._processes.append(LoopbackProcess("scheduler_service", directory, scheduler))

    def _wait(self) -> None:
        deadline = time.monotonic() + self.config.start_timeout_s
        while not all(process.port for process in self._processes):
            self._check(deadline, "does not listen")
            time.sleep(_POLL_S)
        with self.client() as client:
            while not _serves(client):
                self._check(deadline, "does not serve")
                time.sleep(_POLL_S)

    def _check(self, deadline: float, what: str) -> None:
        """Raise LiveServiceError if there is nothing to wait for."""
        for process in self._processes:
            if end := process.end:
                advice = f"\n{_INSTALL}" if "No module named" in end else ""
                raise LiveServiceError(f"the service can't start: {end}{advice}")
        if time.monotonic() > deadline:
            waited_s = self.config.start_timeout_s
            raise LiveServiceError(f"the service {what} after {waited_s:g} s; it wrote:\n{self.log}")

    def _end(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            process.reap()
        self._processes.clear()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


def _serves(client: Client) -> bool:
    try:
        return client.status(timeout_s=_CALL_TIMEOUT_S).state == "serving"
    except (errors.RetryLater, errors.DeadlineExceeded):
        return False
