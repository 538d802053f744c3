"""Mixed load on one `paceline serve`, with tokens, while a fault strikes every few seconds.

usage: python -m tests.bench.soak [--minutes 30] [--fault-every 10] [--seed N] [--workers 24] [--json FILE]

The load: streams with and without drafts, several completions, stop strings, logprobs, deadlines, clients
that leave, aborts, large prompts, tokenizing, hostile texts and messages, refused calls, unary calls, an
operator, stalled readers, half-open connections; half of it through a bad network. The faults: SIGKILL and
SIGSTOP of executor, scheduler, both and the tokenizer's process; everything stands still for some seconds;
connections are reset, stall or are swallowed; the tokens file is rewritten in place, or away for a moment.

Each answer is compared with the one that the same stack gave while nothing happened. A call that ends later
than its deadline and a margin is hung. Once a second memory, descriptors, threads and tasks of each process
are read; from the first third of the time to the last they must not grow. Exit status 1 if anything was
wrong, hung, failed or grew, if pages stay owned at the end, or if a service logged a traceback. The model
is the oracle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from paceline import aio
from paceline.channel import Security
from paceline.errors import PacelineError
from service_kit.identity import token_hash

from tests.bench.serve_faults import healthy
from tests.bench.soak.census import FIGURES, Census
from tests.bench.soak.errands import Errands
from tests.bench.soak.faults import Faults
from tests.bench.soak.proxy import bad_network
from tests.bench.soak.reference import Reference, questions
from tests.bench.soak.tally import MAX_ERRAND_S, Tally
from tests.support.ports import kept_port
from tests.support.serve import Serve, serving

STALL_TIMEOUT_S = 12.0
FAILOVER_TIMEOUT_S = 120.0  # of the clients: several faults may strike one stream in a row
WARM_UP_S = 15.0  # of load without faults
HOSTILE_FIRST = 4
BACK_OFF_S = 0.5  # of who was refused, at most
LOOK_EVERY_S = 1.0
NAMES = ("alice", "bob", "operator")


class Soak:
    """One run. All randomness comes of `seed`; what it meets when does not."""

    def __init__(self, arguments: argparse.Namespace, directory: Path) -> None:
        self._arguments, self._directory = arguments, directory
        self._began = time.monotonic()
        self.tokens = {name: secrets.token_urlsafe(16) for name in NAMES}
        self.tokens_file = directory / "tokens.yaml"
        entries = [
            {"name": name, "sha256": token_hash(token), "weight": weight, "admin": name == "operator"}
            for weight, (name, token) in enumerate(self.tokens.items(), start=1)
        ]
        self.tokens_file.write_text("".join(f"- {json.dumps(entry)}\n" for entry in entries))
        self.executor_token = secrets.token_urlsafe(16)
        (directory / "executor-token").write_text(self.executor_token)
        self.ports = {name: kept_port() for name in ("serve", "scheduler", "executor")}
        self.tally = Tally(self.log)
        self.owned_pages = -1

    def log(self, line: str) -> None:
        """Say it, with the time."""
        print(f"{time.monotonic() - self._began:7.1f} s  {line}", flush=True)

    @property
    def flags(self) -> list[str]:
        """Of `paceline serve`."""
        options: dict[str, dict[str, object]] = {
            "-S": {
                "tokens-file": self.tokens_file,
                "metrics-port": self.ports["scheduler"],
                "stall-timeout-s": STALL_TIMEOUT_S,
            },
            "-E": {"step-ms": 3, "pages": 1500, "metrics-port": self.ports["executor"]},
        }
        flags = ["--executor-token-file", str(self._directory / "executor-token")]
        for flag, given in options.items():
            for name, value in given.items():
                flags += [flag, f"{name}={value}"]
        return flags

    async def run(self, serve: Serve) -> bool:
        """The whole of it; whether all held."""
        arguments = self._arguments
        port = self.ports["serve"]
        census = Census(serve, self.ports | {"serve": 0})
        async with AsyncExitStack() as stack:
            network = await stack.enter_async_context(bad_network(port))

            async def client(name: str, where: int) -> aio.Client:
                made = aio.Client(
                    f"127.0.0.1:{where}",
                    security=Security(token=self.tokens[name]),
                    failover_timeout_s=FAILOVER_TIMEOUT_S,
                )
                return await stack.enter_async_context(made)

            clients = [
                await client(name, where) for name in ("alice", "bob") for where in (port, network.port)
            ]
            operator = await client("operator", port)
            reference = await Reference.asked(questions(arguments.seed), clients[0])
            self.log(f"{len(reference.questions)} answers are known; {arguments.workers} workers begin")
            rng = random.Random(arguments.seed)
            errands = Errands(rng, reference, clients, operator, port, self.tokens["alice"], STALL_TIMEOUT_S)
            faults = Faults(random.Random(arguments.seed + 1), census, network, self.tokens_file, self.log)
            stop = asyncio.Event()
            watching = asyncio.create_task(self._watch(census, stop))
            working = [asyncio.create_task(self._work(errands, stop)) for _ in range(arguments.workers)]
            for _ in range(HOSTILE_FIRST):  # what a tokenizer has once needed it keeps
                await self.tally.run("hostile", errands.hostile)
            await asyncio.sleep(WARM_UP_S)
            end = time.monotonic() + 60 * arguments.minutes
            while time.monotonic() < end and serve.process.poll() is None:
                striking = time.monotonic()
                await faults.strike()
                await asyncio.sleep(max(0.0, arguments.fault_every - (time.monotonic() - striking)))
            self.log("the load ends")
            stop.set()
            await asyncio.wait(working, timeout=MAX_ERRAND_S + 60)
            network.go_on()
            await watching
            self.owned_pages = await self._owned_pages(serve)
        return self._tell(census, faults, serve)

    async def _work(self, errands: Errands, stop: asyncio.Event) -> None:
        while not stop.is_set():
            if not await self.tally.run(*errands.draw()):
                await asyncio.sleep(errands.rng.random() * BACK_OFF_S)

    async def _watch(self, census: Census, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await asyncio.to_thread(census.look)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _owned_pages(self, serve: Serve) -> int:
        """That nobody has given back when all streams have ended and the stack is whole."""
        await healthy(f"127.0.0.1:{self.ports['serve']}", token=self.tokens["operator"])
        owned = -1
        security = Security(token=self.executor_token)
        async with aio.ExecutorClient(serve.executor_address, security=security) as executor:
            for _ in range(400):  # longer than a lease
                try:
                    owned = (await executor.get_status(timeout_s=5)).cache.owned_pages
                except PacelineError:
                    owned = -1
                if owned == 0:
                    break
                await asyncio.sleep(0.1)
        return owned

    def _tell(self, census: Census, faults: Faults, serve: Serve) -> bool:
        tally, growth = self.tally, census.growth()
        lost = [f"{name} for {time.monotonic() - began:.0f} s" for name, began in tally.live.values()]
        load = os.getloadavg()[1]
        print(
            f"\nseed {self._arguments.seed}; load average {load:.1f}; faults: {sum(faults.counts.values())}"
        )
        for name, count in sorted(faults.counts.items()):
            print(f"  {count:4d} {name}")
        print(f"\n{tally.table()}\n")
        print(f"{'process':10s} {'figure':12s} {'':10s} {'1st third':>9s} {'last':>9s} {'highest':>9s}")
        for one in growth:
            print(one)
        alive, bugs = serve.process.poll() is None, serve.log.count("Traceback")
        measured = {one.figure for one in growth}
        good = (
            alive
            and not bugs
            and not (tally.wrong or tally.hung or tally.failed or lost or self.owned_pages)
            and all(one.flat for one in growth)
            and measured == set(FIGURES)
        )
        hung = tally.hung + len(lost)
        print(
            f"\n{tally.wrong} wrong, {hung} hung, {tally.failed} failed, "
            f"{self.owned_pages} pages owned at the end, {bugs} tracebacks, "
            f"serve {'lives' if alive else 'ENDED'}: {'held' if good else 'NOT HELD'}"
        )
        if lost:
            print("never ended:", ", ".join(lost))
        if self._arguments.json:
            told = {
                "seed": self._arguments.seed,
                "wrong": tally.wrong,
                "hung": hung,
                "failed": tally.failed,
                "owned_pages": self.owned_pages,
                "tracebacks": bugs,
                "growing": [str(one) for one in growth if not one.flat],
                "good": good,
            }
            self._arguments.json.write_text(json.dumps(told, indent=1) + "\n")
        return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--fault-every", type=float, default=10.0, help="seconds")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--workers", type=int, default=24, help="calls at once")
    parser.add_argument("--log", type=Path, help="keep the stack's log here")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        soak = Soak(arguments, directory)
        with serving(directory, *soak.flags, port=soak.ports["serve"]) as serve:
            try:
                good = asyncio.run(soak.run(serve))
            finally:
                if arguments.log:
                    arguments.log.write_text(serve.log)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
