"""Adapters of torch models through both processes: each stream has the tokens that it has alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
import pytest

from executor_service.adapters.weights import PARENTS, Factor
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from tests.model.random_adapters import random_adapter
from tests.model.test_blocks import DEFAULT, WIDE, written
from tests.model.tiny import save
from tests.support.adapter_files import PREFIX, write_adapter
from tests.support.stack import Stack, ids_of

pytestmark = pytest.mark.slow

NAMES = ("", *(f"adapter-{i}" for i in range(8)))  # the first one is the model as it is
CASES = [(NAMES[i % len(NAMES)], i // len(NAMES)) for i in range(32)]
"""Name and seed of the streams that run side by side; their prompts are equal."""
PROMPT = [(7 * i) % 200 + 3 for i in range(40)]
TOKENS = 100

Outputs = list[list[list[int]]]
"""Token ids of each completion of each stream."""


@dataclass(frozen=True)
class Files:
    """A model and its adapters."""

    model: Path
    adapters: Path

    @contextmanager
    def served(
        self,
        directory: Path,
        *executor: str,
        scheduler: Sequence[str] = (),
        executors: int = 1,
    ) -> Iterator[tuple[Stack, paceline.Client]]:
        """Both services, and all adapters loaded."""
        stack = Stack(directory)
        try:
            flags = ("--backend", "torch", "--model", str(self.model), "--device", "cpu")
            for _ in range(executors):
                stack.start_executor(*flags, "--adapter-dir", str(self.adapters), *executor)
            stack.start_scheduler(*scheduler)
            stack.scheduler.wait_serving()
            with paceline.Client(stack.scheduler.address) as client:
                for name in NAMES[1:]:
                    client.load_adapter(name)
                yield stack, client
        finally:
            stack.kill()


def write_random_adapters(model: Path, directory: Path) -> None:
    """Of all layers that adapters may change, with ranks 2, 4, ..., 16."""
    backend = TorchBackend(TorchConfig(model))
    backend.load(lambda what, done: None)
    for i, name in enumerate(NAMES[1:]):
        weights = random_adapter(backend, seed=2 * i + 1, rank=2 * i + 2)
        tensors: dict[str, Factor] = {}
        for change in weights.changes:
            path = f"{PREFIX}{change.layer}.{PARENTS[change.module]}.{change.module}"
            tensors |= {f"{path}.lora_A.weight": change.a, f"{path}.lora_B.weight": change.b}
        alpha = weights.scale * weights.rank
        modules = list(weights.modules)
        write_adapter(directory / name, tensors, r=weights.rank, lora_alpha=alpha, target_modules=modules)
    backend.close()


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3-moe", "blocks"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    directory = tmp_path_factory.mktemp(request.param)
    model = directory / "model"
    if request.param == "blocks":  # of a GGUF file, with the types of the default model
        changes = {**WIDE, "sliding_window": None, "vocab_size": 256, "max_position_embeddings": 512}
        model = written("mistral", changes, DEFAULT, directory)
    else:
        save(request.param, model)
    write_random_adapters(model, directory / "adapters")
    return Files(model, directory / "adapters")


@pytest.fixture(scope="module")
def alone(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """One stream after another, none of which finds another one's pages."""
    with files.served(tmp_path_factory.mktemp("alone")) as (_, client):
        found = [output(client, case, cache_salt=str(i)) for i, case in enumerate(CASES)]
    assert len({str(one) for one in found}) == len(CASES)
    return found


def output(client: paceline.Client, case: tuple[str, int], **options: Any) -> list[list[int]]:
    name, seed = case
    options |= {"model": name, "seed": seed, "temperature": 0.9}
    stream = client.generate(token_ids=PROMPT, max_tokens=TOKENS, ignore_eos=True, **options)
    return [ids_of(completion) for completion in stream.collect()]


def side_by_side(client: paceline.Client, **options: Any) -> Outputs:
    with ThreadPoolExecutor(len(CASES)) as threads:
        return list(threads.map(lambda case: output(client, case, **options), CASES))


def test_streams_of_8_adapters_and_of_none_share_steps_drafts_and_forks(
    files: Files, alone: Outputs, tmp_path: Path
) -> None:
    with files.served(tmp_path) as (_, client):
        assert side_by_side(client) == alone
        assert side_by_side(client, speculation=4) == alone
        assert client.status().drafted_tokens > 0
        forked = [output(client, case, n=2, cache_salt=str(i)) for i, case in enumerate(CASES)]
        assert side_by_side(client, n=2) == forked


def test_neither_few_pages_nor_few_slots_nor_two_steps_in_flight_change_a_token(
    files: Files, alone: Outputs, tmp_path: Path
) -> None:
    flags = ("--pages", "40", "--adapter-slots", "3")
    with files.served(tmp_path, *flags, scheduler=["--steps-in-flight", "2"]) as (_, client):
        assert side_by_side(client) == alone
        assert client.status().preemptions > 0


def test_two_ranks_give_each_stream_the_tokens_that_it_has_alone(files: Files, tmp_path: Path) -> None:
    with files.served(tmp_path, "--tensor-parallel", "2") as (_, client):
        together = side_by_side(client)
        assert together == [output(client, case, cache_salt=str(i)) for i, case in enumerate(CASES)]


@pytest.mark.parametrize("files", ["qwen3", "blocks"], indirect=True)  # failover does not depend on the kind
def test_20_killed_executors_change_no_token(files: Files, alone: Outputs, tmp_path: Path) -> None:
    with files.served(tmp_path, executors=2) as (stack, client), ThreadPoolExecutor(1) as thread:
        for _ in range(20):
            streams = thread.submit(side_by_side, client)
            while client.status().running < 3:
                assert not streams.done(), "they ended before the executor could be killed"
            active = next(one.address for one in client.executors() if one.active)
            stack.executor(active).kill()
            assert streams.result() == alone
            stack.restart_executor(active)
