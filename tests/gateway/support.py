"""Stacks behind one gateway, and a gateway of its own, as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.checkout import environment
from tests.support.ports import kept_port
from tests.support.serve import Serve

BEHIND_A_GATEWAY = ("-S", "failover-timeout-s=2", "-S", "heartbeat-timeout-s=2")
"""Settings of a stack that is one of several: a request that it can't serve soon is another one's."""


def url_of(serve: Serve) -> str:
    """Where a `serve --openai` offers the OpenAI API."""
    url = serve.wait_for(r"OpenAI API at (http://[^\s,]+/v1)")[0]
    assert serve.wait_for(r"Chat page at (\S+)") == [url.removesuffix("v1")]
    return url


class BackStack:
    """One stack behind a gateway, which can be started again on its ports."""

    def __init__(self, directory: Path, *arguments: str, backend: str = "oracle") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._port = directory, kept_port()
        self._arguments, self._backend = (*BEHIND_A_GATEWAY, *arguments), backend
        self.serve = self._start()

    def _start(self) -> Serve:
        return Serve(self._directory, *self._arguments, backend=self._backend, port=self._port)

    @property
    def address(self) -> str:
        """Of its scheduler."""
        return f"127.0.0.1:{self._port}"

    @property
    def pids(self) -> dict[str, int]:
        """Of `serve` itself and of its services, by name."""
        return {"serve": self.serve.process.pid, **self.serve.children()}

    def kill(self) -> None:
        """All processes at once."""
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
        self.serve.process.wait()

    def restart(self) -> None:
        """Start it again after `kill`."""
        (self._directory / "port").unlink(missing_ok=True)
        self.serve = self._start()
        assert self.serve.address

    def stop(self) -> None:
        """End it."""
        if self.serve.process.poll() is None:
            for pid in self.pids.values():
                os.kill(pid, signal.SIGCONT)
            self.serve.process.send_signal(signal.SIGTERM)
            self.serve.process.send_signal(signal.SIGTERM)
        self.serve.process.wait(30)


@contextmanager
def gateway(directory: Path, schedulers: list[str], *options: str) -> Iterator[str]:
    """`paceline gateway` in front of these schedulers; yields its URL."""
    log = directory / "gateway.log"
    command = [sys.executable, "-m", "paceline", "gateway", *schedulers, "--listen", "0", *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    gateway_serve = Serve.of(process, log)
    try:
        [url] = gateway_serve.wait_for(r"OpenAI API at (\S+?)\.? Ctrl-C")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
