"""What is checked: an address, or our own backends as processes on loopback."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from paceline.channel import PLAINTEXT, Security

from tests.conformance.kit.client import Executor, reasons_of
from tests.support.processes import running

BACKENDS = ("oracle", "paged-attention", "torch")
SLOW = "slow-oracle"  # takes its time for long steps, so that clients can leave in the middle of them

# Small enough that the checks can fill every page, and that each limit can be reached.
SMALL = [
    *("--page-size", "8", "--pages", "96", "--max-sequences", "64"),
    *("--max-rows", "48", "--max-step-tokens", "512"),
]
ADAPTERS = tuple(f"kit/{letter}" for letter in "abcd")  # below the adapter directory; more than the slots
CONTEXT_LENGTH = 400  # less than the pool, so that it can be reached too


LOAD_TIMEOUT_S = 1800.0
"""How long the kit waits for an executor that says that it is loading its model."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the executor under test listens, and how to reach it."""

    name: str
    security: Security = PLAINTEXT
    address: str = ""  # empty: the name is the address
    adapters: tuple[str, ...] = ()  # that it can load


def start(backend: str, processes: ExitStack, directories: pytest.TempPathFactory) -> Target:
    """One of our own backends as a process of `processes`."""
    directory = directories.mktemp(backend)
    process = processes.enter_context(running("executor_service", arguments(backend, directory), directory))
    return Target(backend, address=process.address, adapters=ADAPTERS)


def arguments(backend: str, directory: Path) -> list[str]:
    """The command line of one of our own backends."""
    # Only our own have models and adapters in files: checking an executor at an address needs no safetensors.
    from tests.conformance.kit.tiny_model import tiny_adapter, write_tiny_model
    from tests.support.adapter_files import write_adapter

    if backend == SLOW:
        knobs = ["--token-us", "400", "--max-piece-tokens", "16"]
        return [*arguments("oracle", directory), *knobs]
    for seed, path in enumerate(ADAPTERS):
        changes = tiny_adapter(seed) if backend == "torch" else {"seed": seed}
        write_adapter(directory / "adapters" / path, **changes)
    adapters = ["--adapter-dir", str(directory / "adapters"), "--adapter-slots", str(len(ADAPTERS) - 1)]
    if backend == "torch":
        model = write_tiny_model(directory / "model", CONTEXT_LENGTH)
        chosen = ["--model", str(model), "--device", "cpu", "--threads", "1"]
    else:
        chosen = ["--context-length", str(CONTEXT_LENGTH)]
    return ["--backend", backend, *chosen, *adapters, *SMALL]


def connect_when_loaded(target: Target, processes: ExitStack, told: Callable[[str], None]) -> Executor:
    """A client of it, as soon as its model is loaded; `told` what it does until then.

    Closed with `processes`. Raises grpc.RpcError if it does not answer, or has not loaded in LOAD_TIMEOUT_S.
    """
    end = time.monotonic() + LOAD_TIMEOUT_S
    while True:
        with ExitStack() as attempt:
            try:
                executor = connect(target, attempt)
            except grpc.RpcError as error:
                if "LOADING" not in reasons_of(error) or time.monotonic() > end:
                    raise
                told(error.details() or "")
            else:
                processes.enter_context(attempt.pop_all())
                return executor
        time.sleep(1)


def connect(target: Target, processes: ExitStack) -> Executor:
    """A client of it. Closed with `processes`."""
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    address, credentials = target.address or target.name, target.security.credentials()
    if target.security.server_name:
        unlimited.append(("grpc.ssl_target_name_override", target.security.server_name))  # type: ignore[arg-type]
    if credentials is None:
        channel = grpc.insecure_channel(address, unlimited)
    else:
        channel = grpc.secure_channel(address, credentials, unlimited)
    return Executor(processes.enter_context(channel), target.security.metadata, target.adapters)
