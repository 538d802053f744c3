"""Adapters through `DeviceRunner`, interpreted on CPU: what plain torch gives, whatever a slot holds."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from executor_service.adapters.registry import LoadedAdapter
from executor_service.adapters.weights import AdapterWeights
from executor_service.backends.base import ForwardRow
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.cuda.kernels import CudaKernels
from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from executor_service.backends.torch_backend.cuda.layout.host_step import HostStep
from executor_service.backends.torch_backend.cuda.run import graphs
from executor_service.backends.torch_backend.cuda.run.device_runner import DeviceRunner
from executor_service.backends.torch_backend.model.host_runner import HostRunner
from executor_service.backends.torch_backend.model.shard import Whole
from executor_service.backends.torch_backend.model.slot_adapters import SlotAdapters
from executor_service.backends.torch_backend.ops.kernels import Kernels, PlainKernels
from executor_service.contract.limits import Limits
from executor_service.contract.plan import Fork, Opening, OutputMode, Release, Sampling
from executor_service.steps.engine import Engine
from tests.conformance.kit.tiny_model import write_tiny_model
from tests.model.random_adapters import random_adapter
from tests.support.engine_steps import BegunStep, begin
from tests.support.untyped import present
from tests.triton.interpreted.device_rows import DRAWN, PAGE, PAGES, TOKENS, following, row, same
from tests.unit.executor.harness import opening, plan
from tests.unit.executor.harness import row as row_of

# Padding tokens attend to nothing, and what they are then is whatever lay in memory.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")
RANKS = (1, 8, 16, 17, 32, 33, 64, 256)
SLOTS = len(RANKS)
SIZES = {
    "_SHORT_TOKENS": (4,), "_LONG_TOKENS": (),
    "_ADAPTED_SHORT_TOKENS": (8,), "_ADAPTED_LONG_TOKENS": (24,),
}  # fmt: skip


def loaded(path: Path, kernels: Kernels, *, runs_ahead: bool) -> TorchBackend:
    """The model with these kernels, and slots for adapters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBackend, "_kernels", lambda self: kernels)
        patch.setattr(TorchBackend, "_runs_ahead", runs_ahead)
        backend = TorchBackend(TorchConfig(path))
        backend.load(lambda what, done: None)
        backend.offer_adapters(SLOTS, 1 << 20)
        backend.allocate(PAGES, PAGE)
    return backend


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", 128)


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[TorchBackend]:
    """The reference, which computes a step at a time."""
    backend = loaded(path, PlainKernels(CPU, torch.float32), runs_ahead=False)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def adapters(plain: TorchBackend) -> list[AdapterWeights]:
    return [random_adapter(plain, seed, rank) for seed, rank in enumerate(RANKS)]


@pytest.fixture(scope="module")
def capturing(path: Path) -> Iterator[TorchBackend]:
    """With graphs for steps with adapters and without, captured when all slots are empty."""
    backend = loaded(path, CudaKernels(CPU, torch.float32), runs_ahead=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, size in SIZES.items():
            patch.setattr(graphs, name, size)
        backend.capture(10, 160, lambda what, done: None)
    yield backend
    backend.close()


def load(adapter: AdapterWeights, slot: int, *backends: TorchBackend) -> None:
    for backend in backends:
        backend.load_adapter(slot, backend.prepare_adapter(adapter))


def full(name: str, start: int, count: int, slot: int = -1) -> ForwardRow:
    """A row whose logits are compared."""
    return replace(row(name, start, count, output=OutputMode.FULL), slot=slot)


def drawn(name: str, start: int, count: int, slot: int = -1) -> ForwardRow:
    return replace(row(name, start, count), slot=slot)


def test_rows_of_eight_adapters_and_of_none_give_what_plain_torch_gives(
    capturing: TorchBackend, plain: TorchBackend, adapters: list[AdapterWeights]
) -> None:
    """Decodes, drafts and prompts; replayed, and where no graph holds the step."""
    for slot, adapter in enumerate(adapters):
        load(adapter, slot, capturing, plain)
    steps = [
        [full("a", 0, 2, 7), full("b", 0, 3), full("c", 0, 1, 0), full("d", 0, 18, 3)],  # a long row
        [full("e", 0, 1, 1), full("f", 0, 1, 2)],
        [drawn("a", 2, 1, 7), drawn("b", 3, 1), full("c", 1, 1, 0), full("e", 1, 3, 1), full("f", 1, 1, 2)],
        [full(name, 0, 4, slot) for slot, name in enumerate("gabcdef", 1)],  # no graph has 28 tokens
    ]
    for rows in steps:
        same(capturing.forward(rows), plain.forward(rows), 2e-5)
    runner = capturing.runner
    assert isinstance(runner, DeviceRunner)
    held = [runner._graphs.find(HostStep(ForwardRows(rows), PAGE, runner._tiling).shape) for rows in steps]
    assert [found is not None for found in held] == [True, True, True, False]


def test_a_captured_step_has_the_adapter_that_its_slot_holds_now(
    capturing: TorchBackend, plain: TorchBackend, adapters: list[AdapterWeights]
) -> None:
    """Loaded, replaced by one of higher and of lower rank and of fewer layers, unloaded, loaded again."""
    few = random_adapter(plain, 9, 4, frozenset({"v_proj", "down_proj"}))
    load(adapters[1], 1, capturing, plain)
    for adapter in (adapters[0], adapters[7], few, None, adapters[2]):
        for backend in (capturing, plain):
            if adapter is None:
                backend.unload_adapter(0)
            else:
                load(adapter, 0, backend)
        rows = [full("a", 0, 2, 1), full("b", 0, 1, -1 if adapter is None else 0)]
        same(capturing.forward(rows), plain.forward(rows), 2e-5)


def test_an_unloaded_slot_has_no_addresses(capturing: TorchBackend, adapters: list[AdapterWeights]) -> None:
    """A step that names it, which no engine launches, is computed without an adapter."""
    load(adapters[3], 5, capturing)
    adapted, (bare,) = capturing.forward([full("a", 0, 3, 5)])[0], capturing.forward([full("a", 0, 3)])
    capturing.unload_adapter(5)
    (found,) = capturing.forward([full("a", 0, 3, 5)])
    assert np.abs(present(adapted.logits) - present(bare.logits)).max() > 0.01
    np.testing.assert_allclose(present(found.logits), present(bare.logits), atol=1e-6)


def test_steps_without_adapters_launch_none_of_their_kernels(
    capturing: TorchBackend, adapters: list[AdapterWeights]
) -> None:
    load(adapters[1], 0, capturing)
    launched = Counter[str]()
    run = Launch.run

    def counted(launch: Launch) -> None:
        launched[launch.kernel.fn.__name__] += 1
        run(launch)

    with mock.patch.object(Launch, "run", counted):
        capturing.forward([drawn("a", 0, 2)])
        capturing.forward([drawn("a", 0, 30)])
        assert not launched.keys() & {"_shrink_kernel", "_expand_kernel"}
        capturing.forward([drawn("a", 0, 2, 0), drawn("b", 0, 1)])
    stacks = 4 * capturing.info.layers
    assert (launched["_shrink_kernel"], launched["_expand_kernel"]) == (stacks, stacks)


def test_a_step_that_is_launched_ahead_goes_on_with_its_slots_and_tokens(
    capturing: TorchBackend, plain: TorchBackend, adapters: list[AdapterWeights]
) -> None:
    """Between the launches another adapter comes to a slot whose rows are not read yet."""
    for slot in (0, 1):
        load(adapters[slot + 1], slot, capturing, plain)
    first = capturing.launch(ForwardRows([drawn("a", 0, 5, 0), drawn("b", 0, 3, 1), drawn("c", 0, 2)]))
    load(adapters[4], 0, capturing)
    second = capturing.launch(ForwardRows([
        replace(following("b", 3, 1), slot=1), full("d", 0, 4, 0), following("c", 2, 2),
    ]))  # fmt: skip
    before, after = first.outputs(), second.outputs()
    same(before, plain.forward([drawn("a", 0, 5, 0), drawn("b", 0, 3, 1), drawn("c", 0, 2)]))
    load(adapters[4], 0, plain)
    tokens = [present(out.tokens)[:1] for out in before]
    known = [
        replace(drawn("b", 3, 1, 1), tokens=tokens[1]), full("d", 0, 4, 0),
        replace(drawn("c", 2, 1), tokens=tokens[2]),
    ]  # fmt: skip
    same(after, plain.forward(known), 2e-5)


def test_the_hosts_runner_has_the_same_kernels(
    capturing: TorchBackend, plain: TorchBackend, adapters: list[AdapterWeights]
) -> None:
    """With several ranks it runs their parts."""
    model, shard = capturing.model, Whole()
    slots = SlotAdapters(model.spec, present(model.kernels.low_rank), shard)
    host = HostRunner(model, shard, model.new_caches(PAGES, PAGE), PAGE, slots)
    for slot in (2, 5):
        slots.load(slot, slots.pack(adapters[slot]))
        load(adapters[slot], slot, plain)
    rows = [full("a", 0, 20, 5), full("b", 0, 3), full("c", 0, 2, 2), full("d", 0, 1, 5)]
    same(host.launch(ForwardRows(rows)).outputs(), plain.forward(rows), 2e-5)


def test_an_engine_with_two_steps_under_way_answers_as_plain_torch_does_one_by_one(
    capturing: TorchBackend, plain: TorchBackend, adapters: list[AdapterWeights]
) -> None:
    """Two slots for four adapters; a fork; an adapter that is unloaded while sequences have it."""
    limits = Limits(
        320, 128, PAGE, PAGES - 1, max_sequences=6, max_rows=6, max_step_tokens=64,
        max_adapters=4, max_adapter_slots=2, max_adapter_rank=256, max_adapter_bytes=1 << 30,
    )  # fmt: skip

    def adapted(cache_id: int, name: str, count: int, number: int | None) -> Opening:
        fingerprint = b"" if number is None else adapters[number].fingerprint
        prompt, sampling = opening(cache_id, TOKENS[name][:count]), replace(DRAWN, seed=cache_id)
        return replace(prompt, sampling=sampling, adapter=fingerprint)

    def answers(backend: TorchBackend, depth: int) -> list[list[list[int]]]:
        engine, steps, results = Engine(backend, limits, 1), deque[BegunStep](), []
        store = engine.store.adapters
        for number in range(4):
            prepared = backend.prepare_adapter(adapters[number])
            store.add(str(number), LoadedAdapter(adapters[number], prepared))
        script = [
            plan(adapted(1, "a", 5, 0), adapted(2, "b", 9, None), adapted(3, "c", 4, 1)),
            plan(row_of(1, 5), row_of(2, 9), row_of(3, 4)),
            plan(row_of(1, 6), row_of(3, 5)),
            plan(row_of(4, 5, [7]), row_of(3, 6), ops=(Fork(1, 4, 5, Sampling()), Release((1,)))),
            plan(row_of(4, 6), row_of(3, 7), row_of(2, 10)),
            plan(row_of(4, 7), adapted(5, "d", 6, 2), ops=(Release((3,)),)),  # in the slot of 1
            plan(row_of(5, 6), row_of(4, 8), row_of(2, 11)),
            plan(row_of(5, 7), adapted(6, "e", 6, 3), ops=(Release((4,)),)),  # in the slot of 0
            plan(row_of(6, 6), row_of(5, 8), row_of(2, 12)),
        ]  # fmt: skip
        for number, what in enumerate(script):
            steps.append(begin(engine, what))
            if number == 4:
                store.remove("0")  # which the fork has
            while len(steps) >= depth:
                results.append(steps.popleft().finish())
        results += [step.finish() for step in steps]
        engine.store.check()
        assert (store.slots.loads, store.slots.evictions, store.slots.used) == (4, 1, 2)
        assert all(answer.refusal is None for result in results for answer in result.rows)
        return [[answer.tokens for answer in result.rows] for result in results]

    expected = answers(plain, 1)
    assert answers(capturing, 2) == expected
    assert all(len(tokens) == 1 for rows in expected for tokens in rows)
