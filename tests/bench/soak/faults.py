"""What strikes a stack in a soak, at random."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from tests.bench.soak.census import Census
from tests.bench.soak.proxy import BadNetwork

MAX_PAUSE_S = 7.0  # for which everything stands still


class Faults:
    """All kinds, for one stack. A process that is not there, because it is being replaced, is spared."""

    def __init__(
        self,
        rng: random.Random,
        census: Census,
        network: BadNetwork,
        tokens_file: Path,
        log: Callable[[str], None],
    ) -> None:
        self._rng, self._census, self._network, self._log = rng, census, network, log
        self._tokens_file, self._tokens = tokens_file, tokens_file.read_text()
        self.counts: dict[str, int] = {}

    async def strike(self) -> None:
        """One of them."""
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
        victims = {"executor": ("executor",), "scheduler": ("scheduler",), "both": ("executor", "scheduler")}
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            f"{name} {whom}": self._signal(number, *processes)
            for name, number in signals.items()
            for whom, processes in (victims | {"tokenizer": ("tokenizer",)}).items()
        }
        kinds |= {
            "everything stands still": self._pause,
            "connections are reset": self._reset,
            "the network stalls": self._stall,
            "the network swallows": self._swallow,
            "the tokens file is written in place": self._rewrite,
            "the tokens file is deleted for a moment": self._delete,
        }
        name = self._rng.choice(list(kinds))
        self.counts[name] = self.counts.get(name, 0) + 1
        self._log(f"fault: {name}")
        await kinds[name]()

    def _signal(self, number: signal.Signals, *roles: str) -> Callable[[], Awaitable[None]]:
        async def send() -> None:
            processes = self._census.processes()
            for role in roles:
                if role in processes:
                    with suppress(ProcessLookupError):
                        os.kill(processes[role], number)

        return send

    async def _pause(self) -> None:
        pids = self._census.processes().values()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self._rng.random() * MAX_PAUSE_S)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _reset(self) -> None:
        self._network.reset()

    async def _stall(self) -> None:
        self._network.stall()
        await asyncio.sleep(self._rng.random() * 8)
        self._network.go_on()

    async def _swallow(self) -> None:
        self._network.swallow()

    async def _rewrite(self) -> None:
        with self._tokens_file.open("w") as file:  # truncated first
            for piece in (self._tokens[:40], self._tokens[40:]):
                await asyncio.sleep(self._rng.random())
                file.write(piece)
                file.flush()

    async def _delete(self) -> None:
        self._tokens_file.unlink()
        await asyncio.sleep(self._rng.random() * 3)
        self._tokens_file.write_text(self._tokens)
