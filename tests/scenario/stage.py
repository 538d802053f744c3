"""The services of the scenario: schedulers in the states that clients meet, in front of one oracle."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import paceline
from paceline import errors
from paceline.channel import Security
from service_kit.identity import token_hash

from tests.scenario.liar import lying
from tests.scenario.proxies import Cutting, Newer, Proxy, Stalling, serving
from tests.support.adapter_files import write_adapter
from tests.support.checkout import ROOT
from tests.support.ports import kept_port
from tests.support.processes import ServiceProcess, running

NOBODY = "nobody"
"""The name of an address where nothing listens."""
MORTAL = ("first", "second", "lone")
"""Schedulers that the scenario may strike."""
TELLING, TOLD = "telling", "told"
"""The directory of the first has the second. Both are mortal."""
PROXIES: Mapping[str, type[Proxy]] = {"cutting": Cutting, "stalling": Stalling, "newer": Newer}
"""Stand in front of `first`."""
MUTE = "mute"
"""Accepts connections, and says nothing, as a scheduler that is frozen when a client comes."""
LIAR = "liar"
"""Tells the lie that the prompt of a request names."""
LOADING = "loading"
"""Has an executor only once `load` was called."""
BROKEN = "broken"
"""Its executor could not load its model."""
UNKNOWN = "unknown"
"""The name of an address whose host does not exist."""
ADAPTER = "pirate"
"""Served beside the model."""
STRIKES = ("kill", "freeze", "restart")
TOKEN = "the-scenarios-token"
TLS = ROOT / "tests" / "support" / "tls"

_ORACLE = ("--backend", "oracle", "--pages", "4096", "--step-ms", "4")
_TIMEOUT_S = 90.0


class Stage:
    """Schedulers by the names that the scenario has for them."""

    def __init__(self, directory: Path, executor: ServiceProcess) -> None:
        self._directory = directory
        self._executor = executor
        self._schedulers: dict[str, ServiceProcess] = {}
        self._ports = {name: kept_port() for name in (NOBODY, *MORTAL, TELLING, TOLD)}
        self._executors = {name: kept_port() for name in (LOADING, BROKEN)}  # ports of their own executors
        self._own: list[ServiceProcess] = []  # the executors there
        self._starts = 0
        self._proxies: dict[str, Proxy] = {}
        self._liar = ""  # its address
        self._mute = socket.create_server(("127.0.0.1", 0))

    def address(self, name: str) -> str:
        """host:port; waits for the port."""
        if name in self._proxies:
            return self._proxies[name].address
        if name == MUTE:
            return f"127.0.0.1:{self._mute.getsockname()[1]}"
        if name == LIAR:
            return self._liar
        if name == UNKNOWN:
            return f"{64 * 'x'}:50051"  # too long for a name: no name server is asked
        return f"127.0.0.1:{self._ports.get(name) or self._schedulers[name].port}"

    def start(self, name: str, *arguments: str) -> ServiceProcess:
        """Start a scheduler, which may not serve yet."""
        self._starts += 1
        port = str(self._ports.get(name, 0))
        if name in self._executors:
            flags = ["--executor", f"127.0.0.1:{self._executors[name]}"]
        else:
            flags = ["--executor", self._executor.address, "--adapter", ADAPTER]
        flags += ["--log-level", "info", "--port", port, *arguments]
        process = ServiceProcess("scheduler_service", flags, self._directory / f"{name}{self._starts}")
        self._schedulers[name] = process
        return process

    @contextmanager
    def serving(self, *names: str) -> Iterator[None]:
        """Wait until these schedulers serve; meanwhile there are proxies in front of the first."""
        for name in names:
            self._schedulers[name].wait_serving()
        with ExitStack() as proxies:
            self._liar = proxies.enter_context(lying())
            for name, kind in PROXIES.items():
                self._proxies[name] = proxies.enter_context(serving(kind, self.address("first")))
            yield

    @property
    def continuations(self) -> int:
        """Streams that were continued at `cutting`."""
        cutting = self._proxies["cutting"]
        assert isinstance(cutting, Cutting)
        return cutting.continuations

    @contextmanager
    def full_queue(self) -> Iterator[None]:
        """Meanwhile `full` has one running request, and no room for another beside the one that waits."""
        with paceline.Client(self.address("full")) as client, ExitStack() as streams:
            # The second one would be refused while the first one is still in the queue.
            for number in ("running", "waiting"):
                stream = client.generate("endless", max_tokens=30_000, ignore_eos=True)
                streams.callback(stream.close)
                self._until(partial(_is_one, client, number), f"`full` has none {number}")
            yield
        self.wait_idle(["full"])

    def load(self, name: str, *arguments: str) -> ServiceProcess:
        """Start the executor of a scheduler that has one of its own."""
        flags = ["--backend", "oracle", "--port", str(self._executors[name]), *arguments]
        self._own.append(ServiceProcess("executor_service", flags, self._directory / f"own{len(self._own)}"))
        return self._own[-1]

    def break_down(self) -> None:
        """Let the executor of `broken` fail until its scheduler has heard why. Raises TimeoutError."""
        address = self.address(BROKEN)

        def is_told() -> bool:
            self.load(BROKEN, "--kv-memory", "1").wait(_TIMEOUT_S)
            with paceline.Client(address, failover_timeout_s=0) as client:
                try:
                    client.model_info(timeout_s=_TIMEOUT_S)
                except errors.Unavailable as error:
                    return "can't be loaded" in error.message
            return False

        self._until(is_told, "`broken` hears of no failure")

    def strike(self, how: str, names: Sequence[str]) -> list[str] | None:
        """Strike the one of these schedulers that has running sequences; the names of those that remain.

        Killed, frozen until `thaw`, or killed and started again on its port. None, and none is struck, if
        none runs anything: the stream has ended. The executor is stopped meanwhile, so that the stream can't
        end between the question and the strike.
        """
        with self._executor_stopped():
            struck = next((name for name in names if self._running(name)), None)
            if struck is None:
                return None
            process = self._schedulers[struck]
            if how == "freeze":
                process.signal(signal.SIGSTOP)
            else:
                process.kill()
        if how == "restart":
            self.start(struck)
            return [struck]
        return [other for other in names if other != struck]

    @contextmanager
    def _executor_stopped(self) -> Iterator[None]:
        self._executor.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._executor.signal(signal.SIGCONT)

    def thaw(self) -> None:
        """Let frozen schedulers run on."""
        for process in self._schedulers.values():
            if process.running:
                process.signal(signal.SIGCONT)

    def wait_told(self) -> None:
        """Wait until the directory of `telling` has `told`."""

        def is_told() -> bool:
            with paceline.Client(self.address(TELLING)) as client:
                client.abort(["nobody"])  # which asks all, so it looks into the directory before
                return client.addresses[1:] == (self.address(TOLD),)

        self._until(is_told, f"{TELLING} does not know {TOLD}")

    def wait_ready(self, name: str, security: Security) -> None:
        """Wait until a scheduler that answers nobody without TLS has an executor."""
        with paceline.Client(self.address(name), security=security) as client:
            self._until(lambda: client.status().ready_executors > 0, f"{name} does not get ready")

    def wait_idle(self, names: Iterable[str]) -> None:
        """Wait until these schedulers compute nothing. Raises TimeoutError if one goes on."""
        for name in ("first" if name in PROXIES else name for name in names):
            self._until(partial(self._is_idle, name), f"{name} goes on computing")

    def requests(self, name: str) -> int:
        """Requests that a scheduler has taken since its start."""
        with paceline.Client(self.address(name)) as client:
            return client.status(timeout_s=_TIMEOUT_S).requests

    def kill(self) -> None:
        """End all schedulers."""
        self._mute.close()
        for process in (*self._schedulers.values(), *self._own):
            process.kill()

    def _is_idle(self, name: str) -> bool:
        return self._running(name) == 0

    def _running(self, name: str) -> int:
        with paceline.Client(self.address(name)) as client:
            return client.status(timeout_s=_TIMEOUT_S).running

    @staticmethod
    def _until(condition: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not _holds(condition):
            if time.monotonic() > deadline:
                raise TimeoutError(complaint)
            time.sleep(0.02)


def _is_one(client: paceline.Client, number: str) -> bool:
    return bool(getattr(client.status(), number) == 1)


def _holds(condition: Callable[[], bool]) -> bool:
    """Whether a scheduler that is asked says so; it may be away."""
    try:
        return condition()
    except errors.RetryLater:
        return False


@contextmanager
def stage(directory: Path) -> Iterator[Stage]:
    """The services of one language, serving. Raises TimeoutError if they do not."""
    tokens = directory / "tokens.yaml"
    tokens.write_text(f"- {{name: scenario, sha256: {token_hash(TOKEN)}}}\n")
    tls = ("--tls-cert", str(TLS / "server.pem"), "--tls-key", str(TLS / "server.key"))
    write_adapter(directory / "adapters" / ADAPTER)
    oracle = [*_ORACLE, "--adapter-dir", str(directory / "adapters")]
    with running("executor_service", oracle, directory / "executor") as executor:
        made = Stage(directory, executor)
        try:
            for name in MORTAL:
                made.start(name)
            told = made.address(TOLD)
            made.start(TOLD, "--advertise", told)
            made.start(TELLING, "--advertise", made.address(TELLING), "--peer", told)
            made.start("full", "--max-running", "1", "--max-queued-requests", "1")
            made.start("secured", "--tokens-file", str(tokens), *tls)
            made.start(LOADING)
            made.start(BROKEN)
            with made.serving("full", *MORTAL, TELLING, TOLD):
                made.wait_told()
                made.wait_ready("secured", Security(TLS / "ca.pem", token=TOKEN))
                made.break_down()
                yield made
        finally:
            made.kill()
