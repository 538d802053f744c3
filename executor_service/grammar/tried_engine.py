"""`TriedEngine`: compiles a grammar here once another process has compiled it.

The library's limits do not count all of its work, and a crash of it can't be caught. Either ends a process
that tries grammars, and the grammar is refused; the executor goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

from service_kit.logs import Log
from service_kit.standstill import killed_if_still

import executor_service
from executor_service.contract.grammar import Grammar
from executor_service.grammar.engine import GrammarEngine
from executor_service.grammar.source import UNTRIED, GrammarInvalid, GrammarSource

CPU_S = 0.5
"""CPU time to compile a grammar in; what is not hostile takes milliseconds."""

log = Log(__name__)


class TrialProcess:
    """A process that compiles grammars, started when it is needed; any thread."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        """`settings`: of its engine, and `cpu_s`."""
        self._settings = json.dumps(settings).encode() + b"\n"
        self._turn = Lock()  # of who asks
        self._lock = Lock()  # of the next two
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def why_not(self, source: GrammarSource) -> str:
        """Why a grammar can't be compiled; "": it can. Raises GrammarInvalid once this is closed."""
        with self._turn:
            return self._why_not(source)

    def _why_not(self, source: GrammarSource) -> str:
        grammar = {"kind": source.kind, "text": source.text, "choices": source.choices}
        line = json.dumps(grammar).encode() + b"\n"
        status = 0
        for _ in range(2):  # it may have been ended by somebody else, or have stood still
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError), killed_if_still(process) as watch:
                process.stdin.write(line)
                process.stdin.flush()
                if answer := process.stdout.readline():
                    return str(json.loads(answer))
            status = self._end(process)
            if status == -signal.SIGPROF:
                break
        log.warning("a grammar ended the process that tried it", status=status, kind=source.kind)
        if status == -signal.SIGPROF:
            return "it takes more work to compile than the limits allow"
        return UNTRIED if watch.has_killed else "the grammar engine failed on this grammar"

    def close(self) -> None:
        """End the process, also while a grammar is tried."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        with self._turn:
            if self._process is not None:
                self._end(self._process)

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, started if there is none. Raises GrammarInvalid once this is closed."""
        with self._lock:
            if self._process is None:
                if self._closed:
                    raise GrammarInvalid("the executor ends")
                self._process = subprocess.Popen(
                    (sys.executable, "-P", "-m", "executor_service.grammar.trial"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=_environment(),
                )
                assert self._process.stdin is not None
                with suppress(BrokenPipeError):  # then the next write fails, too
                    self._process.stdin.write(self._settings)
            return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Forget a process that has ended or is about to; returns its exit status."""
        with self._lock:
            self._process = None
        process.communicate()
        return process.wait()


class TriedEngine:
    """Compiles; any thread, as many at once as there are processes."""

    def __init__(self, engine: GrammarEngine, settings: Mapping[str, object], processes: int) -> None:
        """`settings`: from which `engine` was made."""
        self._engine = engine
        self._all = [TrialProcess({**settings, "cpu_s": CPU_S}) for _ in range(processes)]
        self._free: SimpleQueue[TrialProcess] = SimpleQueue()
        for process in self._all:
            self._free.put(process)

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints and vocabularies, equal masks."""
        return self._engine.fingerprint

    def compile(self, source: GrammarSource) -> Grammar:
        """As `GrammarEngine.compile`."""
        process = self._free.get()
        try:
            why = process.why_not(source)
        finally:
            self._free.put(process)
        if why:
            raise GrammarInvalid(why)
        return self._engine.compile(source)

    def close(self) -> None:
        """End the processes."""
        for process in self._all:
            process.close()


def _environment() -> dict[str, str]:
    """The executor's environment without its settings and secrets, and with this package on the path."""
    root = Path(executor_service.__file__).parents[1]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PACELINE_")}
    return kept | {"PYTHONPATH": path}
