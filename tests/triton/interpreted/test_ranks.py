"""Two gloo ranks with a `DeviceRunner` each, interpreted on CPU, give the tokens of one process."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn
from unittest import mock

import numpy as np
import pytest
import torch

from executor_service.backends.base import Backend, PromptOutputs
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.model.host_runner import HostRunner
from executor_service.backends.torch_backend.model.shard import Whole
from executor_service.backends.torch_backend.ops.kernels import PlainKernels
from executor_service.backends.torch_backend.parallel.followers import Followers
from executor_service.backends.torch_backend.parallel.leader import LeaderBackend
from executor_service.backends.torch_backend.parallel.ranks import Rank, listen
from executor_service.contract.limits import Limits
from executor_service.contract.plan import Fork, OutputMode, Sampling
from executor_service.steps.engine import Engine
from tests.conformance.kit.tiny_model import write_tiny_model
from tests.model.random_adapters import random_adapter
from tests.support.collectives import counted_collectives
from tests.support.engine_steps import BegunStep, begin
from tests.support.untyped import present
from tests.triton.interpreted.device_rank import TIMEOUT_S, interpreted_device
from tests.triton.interpreted.device_rows import DRAWN, MIXED, PAGE, PAGES, TOKENS, following, row, same
from tests.triton.interpreted.rows_behind_drafts import check_rows_behind_drafts
from tests.unit.executor.harness import opening, plan
from tests.unit.executor.harness import row as row_of
from tests.unit.executor.table_grammar import loops

# Padding tokens attend to nothing, and what they are then is whatever lay in memory.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")
SLOTS, LAYERS = 2, 2
ATOL = 1e-4  # sums are rounded elsewhere


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", 128)


@pytest.fixture(scope="module")
def one(path: Path) -> Iterator[TorchBackend]:
    """One process, which computes a step at a time in plain torch."""
    with mock.patch.object(TorchBackend, "_kernels", return_value=PlainKernels(CPU, torch.float32)):
        backend = TorchBackend(TorchConfig(path))
        backend.load(lambda what, done: None)
    backend.offer_adapters(SLOTS, 1 << 20)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def two(path: Path) -> Iterator[LeaderBackend]:
    """Two processes, after a capture; "graphs" compute their step again."""

    def lost(rank: int, status: int) -> NoReturn:
        raise AssertionError(f"rank {rank} ended with status {status}")

    listener = listen()
    first, second = (Rank.on_this_machine(number, 2, listener.getsockname()[1]) for number in range(2))
    command = [sys.executable, "-m", "tests.triton.interpreted.device_rank", str(path)]
    followers = Followers(command, [second], lost)
    backend = LeaderBackend(TorchConfig(path), first, TIMEOUT_S, followers, listener)
    with interpreted_device():
        backend.load(lambda what, done: None)
        backend.offer_adapters(SLOTS, 1 << 20)
        backend.allocate(PAGES, PAGE)
        backend.capture(8, 160, lambda what, done: None)
    yield backend
    backend.close()


@pytest.fixture
def host(one: TorchBackend) -> HostRunner:
    """On KV storage of its own."""
    one.allocate(PAGES, PAGE)
    return HostRunner(one.model, Whole(), one.model.new_caches(PAGES, PAGE), PAGE)


def test_steps_of_every_kind_give_what_one_process_gives(two: LeaderBackend, host: HostRunner) -> None:
    for rows in MIXED:
        same(two.launch(ForwardRows(rows)).outputs(), host.launch(ForwardRows(rows)).outputs(), ATOL)


def test_prompts_are_scored_and_pooled_as_in_one_process(two: LeaderBackend, host: HostRunner) -> None:
    """Beside a row that samples, which the next launch continues."""
    plain = row("a", 0, 40, outputs=0, output=OutputMode.NONE, sampling=Sampling(logprobs=2))
    pooled = row("d", 0, 9, outputs=0, output=OutputMode.HIDDEN)
    rows = [
        replace(plain, prompt=PromptOutputs(5, np.array(TOKENS["a"][5:41], np.int32))),
        row("b", 0, 20),
        replace(pooled, prompt=PromptOutputs(last=True, total=True)),
    ]
    ours, theirs = two.launch(ForwardRows(rows)).outputs(), host.launch(ForwardRows(rows)).outputs()
    same(ours, theirs, ATOL)
    scores, expected = present(ours[0].scores), present(theirs[0].scores)
    assert scores.top_ids.tolist() == expected.top_ids.tolist()
    np.testing.assert_allclose(scores.logprobs, expected.logprobs, atol=ATOL)
    np.testing.assert_allclose(present(ours[2].hidden), present(theirs[2].hidden), atol=ATOL)
    np.testing.assert_allclose(present(ours[2].hidden_sum), present(theirs[2].hidden_sum), atol=1e-3)
    tokens = present(ours[1].tokens)
    known = replace(row("b", 20, 1), tokens=tokens, history=np.append(rows[1].history, tokens))
    same(
        two.launch(ForwardRows([following("b", 20, 1)])).outputs(),
        host.launch(ForwardRows([known])).outputs(),
        ATOL,
    )


@pytest.mark.parametrize("seed", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_row_behind_drafts_that_are_not_read_starts_where_these_end_on_every_rank(
    two: LeaderBackend, host: HostRunner, seed: int
) -> None:
    """Also where only rank 0 knows what was picked: after penalties, biases, masks."""
    check_rows_behind_drafts(two, host, seed, ATOL)


def test_adapters_change_what_they_change_in_one_process(one: TorchBackend, two: LeaderBackend) -> None:
    """In graphs, in whose slots are other adapters by the time of the last step."""
    adapters = [random_adapter(one, seed, rank) for seed, rank in enumerate((3, 16, 17))]
    one.allocate(PAGES, PAGE)
    slots = {"a": 0, "b": 1, "c": -1, "d": 0}
    rows = [replace(row(name, 0, 1, output=OutputMode.FULL), slot=slot) for name, slot in slots.items()]
    found = []
    for backend in (one, two):
        prepared = [backend.prepare_adapter(adapter) for adapter in adapters]
        backend.load_adapter(0, prepared[0])
        backend.load_adapter(1, prepared[1])
        first = backend.launch(ForwardRows(rows)).outputs()
        backend.unload_adapter(0)
        backend.load_adapter(0, prepared[2])
        found.append([present(out.logits) for out in (*first, *backend.launch(ForwardRows(rows)).outputs())])
        for slot in range(SLOTS):
            backend.unload_adapter(slot)
    for ours, theirs in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=ATOL)
    assert np.abs(found[0][0] - found[0][4]).max() > 0.1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.5, frequency_penalty=0.7, logit_bias=((5, 2.0),), logprobs=2),
        replace(DRAWN, grammar=loops(end=257, vocabulary=320)),
    ],
    ids=["penalties", "grammar"],
)
def test_an_engine_with_two_steps_under_way_answers_as_one_process_does(
    one: TorchBackend, two: LeaderBackend, sampling: Sampling
) -> None:
    """With a fork, whose last page every rank copies."""
    limits = Limits(320, 128, PAGE, PAGES - 1, max_sequences=4, max_rows=4, max_step_tokens=64)
    openings = [replace(opening(1, TOKENS["a"][:5]), sampling=sampling), opening(2, TOKENS["b"][:9], seed=4)]

    def answers(backend: Backend) -> list[list[list[int]]]:
        engine, steps, results = Engine(backend, limits, 1), deque[BegunStep](), []
        for n in range(5):
            rows = [row_of(1, 5 + n - 1), row_of(2, 9 + n - 1)] if n else []
            steps.append(begin(engine, plan(*rows, *(() if n else openings))))
            while len(steps) >= backend.max_pending_forwards:
                assert len(engine.pipeline) == (0 if backend is one else 2)
                results.append(steps.popleft().finish())
        steps.append(begin(engine, plan(row_of(3, 10, [7]), row_of(2, 13), ops=(Fork(2, 3, 10, DRAWN),))))
        results += [step.finish() for step in steps]
        engine.store.check()
        return [[answer.tokens for answer in result.rows] for result in results]

    one.allocate(PAGES, PAGE)
    expected = answers(one)
    assert answers(two) == expected
    assert all(tokens for step in expected for tokens in step)


@pytest.mark.parametrize("tokens", [1, 25], ids=["captured", "eager"])
def test_a_step_is_one_broadcast_two_sums_a_layer_and_one_gather_of_logits(
    two: LeaderBackend, tokens: int
) -> None:
    """And the sum for the embedding. Rows of any kind share the gather, and nothing of it is on the host."""
    kinds = {"a": DRAWN, "b": Sampling()}
    rows = [row(name, 0, tokens, sampling=sampling) for name, sampling in kinds.items()]
    with counted_collectives() as counts:
        two.launch(ForwardRows(rows)).outputs()
    assert counts == {"broadcast": 1, "_all_gather": 1 + 2 * LAYERS + 1}


def test_rows_that_want_more_than_a_token_add_a_broadcast_their_logits_and_where_they_end(
    two: LeaderBackend,
) -> None:
    """However many they are; those whose tokens stay are followed without being told."""
    with counted_collectives() as counts:
        two.launch(ForwardRows([row(name, 0, 1, sampling=Sampling(logprobs=2)) for name in "ab"])).outputs()
    assert counts == {"broadcast": 2, "_all_gather": 2 + 2 * LAYERS + 1}
    penalized = replace(DRAWN, repetition_penalty=1.5)
    with counted_collectives() as counts:
        two.launch(ForwardRows([row(name, 0, 1, sampling=penalized) for name in "abc"])).outputs()
    assert counts == {"broadcast": 3, "_all_gather": 2 + 2 * LAYERS + 1}
