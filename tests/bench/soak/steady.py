"""Many mixed operations without any fault: whether memory ends to grow.

usage: python -m tests.bench.soak.steady [--operations 100000] [--workers 16] [--seed N]

A scheduler and an executor of the oracle, with tokens and without a step time. The operations are the soak's
errands, with short completions and without those that wait on purpose, and evaluations beside them. The
scheduler keeps its log of steps for 30 s (`forgetful`), as its bound of 64 MiB is reached after hours. The
resident memory of each process is printed 20 times. It is flat if the median of the last tenth of the samples
is at most 2 MiB above that of the tenth after the first half. Exit status 1 if it is not, or if any answer
was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from paceline import aio, errors
from paceline.channel import Security
from service_kit.identity import token_hash

from tests.bench.soak import forgetful
from tests.bench.soak.census import memory_mb, tokenizers_of
from tests.bench.soak.errands import Errands
from tests.bench.soak.reference import Reference, questions
from tests.bench.soak.tally import Tally
from tests.support.processes import ServiceProcess

MAX_GROWTH_MIB = 2.0
SAMPLES = 200
ROWS = 20
WEIGHTS = {"stream": 30, "unary": 20, "cancel": 12, "abort": 8, "deadline": 8, "refused": 8, "operate": 4}
EVALUATIONS = {"score": 4, "embed": 4, "rerank": 2, "tokenize": 6}
MAX_TOKENS, MAX_CHARACTERS = 8, 400
NAMES = ("alice", "bob", "operator")


class Operations:
    """Draws operations and counts them."""

    def __init__(self, errands: Errands, tally: Tally, count: int) -> None:
        self._errands, self._tally, self._count = errands, tally, count
        self.begun = 0

    async def work(self) -> None:
        """One worker, until all operations have begun."""
        while self.begun < self._count:
            self.begun += 1
            await self._tally.run(*self._drawn())

    def _drawn(self) -> tuple[str, Callable[[], Awaitable[str]]]:
        weights = WEIGHTS | EVALUATIONS
        (name,) = self._errands.rng.choices(list(weights), list(weights.values()))
        return name, getattr(self, f"_{name}") if name in EVALUATIONS else getattr(self._errands, name)

    def _texts(self, count: int) -> list[str]:
        rng = self._errands.rng
        return [f"{rng.getrandbits(32)} is a number" for _ in range(count)]

    def _client(self) -> aio.Client:
        return self._errands.rng.choice(self._errands.clients)

    async def _score(self) -> str:
        return await _answered(self._client().score(self._texts(2)))

    async def _embed(self) -> str:
        return await _answered(self._client().embed(self._texts(3)))

    async def _rerank(self) -> str:
        return await _answered(self._client().rerank("which?", self._texts(4), method="likelihood"))

    async def _tokenize(self) -> str:
        return await _answered(self._client().tokenize(self._texts(1)[0]))


async def _answered(call: Awaitable[object]) -> str:
    try:
        await call
    except errors.RetryLater as error:
        return type(error).__name__
    return "ok"


class Samples:
    """The resident memory of processes over time, in MiB."""

    def __init__(self, executor: ServiceProcess, scheduler: ServiceProcess) -> None:
        self._pids = {"executor": executor.pid, "scheduler": scheduler.pid}
        self._pids["tokenizer"], *_ = tokenizers_of(scheduler.pid)
        self.taken: dict[str, list[float]] = {role: [] for role in self._pids}

    def take(self) -> Mapping[str, float]:
        """The next one."""
        found = {role: memory_mb(pid) / 1.048576 for role, pid in self._pids.items()}
        for role, mib in found.items():
            self.taken[role].append(mib)
        return found

    def verdict(self) -> bool:
        """Print the growth of each; whether all were flat."""
        flat = True
        tenth = SAMPLES // 10
        for role, taken in self.taken.items():
            half, last = (statistics.median(taken[at : at + tenth]) for at in (5 * tenth, 9 * tenth))
            flat = flat and last - half <= MAX_GROWTH_MIB
            print(
                f"{role:10s} {taken[0]:7.1f} at first, {half:7.1f} after the half, {last:7.1f} MiB at the end"
            )
        return flat


async def run(arguments: argparse.Namespace, executor: ServiceProcess, scheduler: ServiceProcess) -> bool:
    """The whole of it; whether memory was flat and all answers right."""
    began = time.monotonic()
    tally = Tally(lambda line: print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True))
    samples = Samples(executor, scheduler)
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(
                aio.Client(scheduler.address, security=Security(token=token))
            )
            for name, token in arguments.tokens.items()
        }
        rng, asked = random.Random(arguments.seed), questions(arguments.seed)
        asked = [
            replace(
                one,
                options={**one.options, "max_tokens": rng.randint(1, MAX_TOKENS)},
                text=one.text[:MAX_CHARACTERS],
            )
            for one in asked
        ]
        reference = await Reference.asked(asked, clients["alice"])
        errands = Errands(
            *(rng, reference, [clients["alice"], clients["bob"]], clients["operator"], scheduler.port),
            token=arguments.tokens["alice"],
            stall_timeout_s=60.0,
        )
        operations = Operations(errands, tally, arguments.operations)
        working = [asyncio.create_task(operations.work()) for _ in range(arguments.workers)]
        for at in range(1, SAMPLES + 1):
            while operations.begun < at * arguments.operations // SAMPLES:  # noqa: ASYNC110  # a sample's time
                await asyncio.sleep(0.02)
            found = samples.take()
            if at % (SAMPLES // ROWS) == 0:
                told = ", ".join(f"{role} {mib:.1f}" for role, mib in found.items())
                print(
                    f"{operations.begun:7d} operations, {time.monotonic() - began:5.0f} s, MiB: {told}",
                    flush=True,
                )
        await asyncio.gather(*working)
    print(f"\n{tally.table()}\n")
    good = samples.verdict() and not (tally.wrong or tally.hung or tally.failed)
    print("held" if good else "NOT HELD")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=16, help="operations at once")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    arguments.tokens = {name: secrets.token_urlsafe(16) for name in NAMES}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        entries = [
            {"name": name, "sha256": token_hash(token), "admin": name == "operator"}
            for name, token in arguments.tokens.items()
        ]
        tokens = directory / "tokens.yaml"
        tokens.write_text("".join(f"- {json.dumps(entry)}\n" for entry in entries))
        executor = ServiceProcess(
            "executor_service", ["--backend", "oracle", "--pages", "1500"], directory / "executor"
        )
        try:
            flags = ["--executor", executor.wait_serving().address, "--tokens-file", str(tokens)]
            scheduler = ServiceProcess(forgetful.__name__, flags, directory / "scheduler")
            try:
                return 0 if asyncio.run(run(arguments, executor, scheduler.wait_serving())) else 1
            finally:
                scheduler.kill()
        finally:
            executor.kill()


if __name__ == "__main__":
    sys.exit(main())
