"""Real service processes for tests: start, wait until they serve, signal, read their logs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from paceline.channel import Link, open_channel
from service_kit.procfs import process_state

from tests.support.checkout import environment
from tests.support.fork_server import Command, ForkedProcess

START_TIMEOUT_S = 600.0  # the first start on a machine compiles kernels


def stop(pid: int) -> None:
    """Stop a process, and wait until it has stopped: on a busy machine that is later than the signal."""
    os.kill(pid, signal.SIGSTOP)
    while (state := process_state(pid)) is not None and not state.is_stopped:
        time.sleep(0.001)


class ServiceProcess:
    """One module that runs as a process on loopback, on a port of its own choosing."""

    def __init__(self, module: str, arguments: list[str], directory: Path, stdin: int | None = None) -> None:
        """`stdin`: a descriptor; None: /dev/null."""
        directory.mkdir(parents=True, exist_ok=True)
        self._port_file = directory / "port"
        self._log_file = directory / "log"
        with self._log_file.open("wb") as log, open(os.devnull, "rb") as nothing:
            flags = ["--port", "0", "--port-file", str(self._port_file), *arguments]
            self._process = ForkedProcess(
                Command(module, flags, environment()),
                nothing.fileno() if stdin is None else stdin,
                log.fileno(),
                log.fileno(),
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def port(self) -> int:
        """The bound port; waits for it."""
        return self._bound(START_TIMEOUT_S)

    def _bound(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while not self._port_file.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no port (exit status {self._process.poll()}):\n{self.log}")
            time.sleep(0.01)
        return int(self._port_file.read_text())

    @property
    def address(self) -> str:
        """host:port; waits for the port."""
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """Everything written to stdout and stderr so far."""
        return self._log_file.read_text(errors="replace")

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def wait_serving(self, timeout_s: float = START_TIMEOUT_S) -> ServiceProcess:
        """Block until health says SERVING. Raises RuntimeError with the log if it does not in time."""
        self._bound(timeout_s)
        with open_channel(self.address, Link.PRIVATE) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True)
            try:
                for response in watch:
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return self
            except grpc.RpcError as error:
                raise RuntimeError(
                    f"not serving (exit status {self._process.poll()}):\n{self.log}"
                ) from error
            finally:
                watch.cancel()
        raise RuntimeError(f"health ended:\n{self.log}")

    def signal(self, number: int) -> None:
        """Send a signal to this process alone."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 30.0) -> int:
        """The exit status, once it has ended. Raises subprocess.TimeoutExpired."""
        return self._process.wait(timeout_s)

    def terminate(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, and the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL, also of a stopped process, and reap it."""
        if self.running:
            self._process.kill()
        self._process.wait()


@contextmanager
def running(module: str, arguments: list[str], directory: Path) -> Iterator[ServiceProcess]:
    """A serving process, killed at the end if it still runs."""
    process = ServiceProcess(module, arguments, directory)
    try:
        yield process.wait_serving()
    finally:
        process.kill()


def executor(*arguments: str, directory: Path) -> ServiceProcess:
    """An executor that may still be starting; the caller kills it."""
    return ServiceProcess("executor_service", list(arguments), directory)
