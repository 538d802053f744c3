"""What is captured, of every model and format, runs without the host, in the memory that is kept for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch

from executor_service.backends.torch_backend import memory
from executor_service.backends.torch_backend.cuda.layout.adapted_tokens import max_tiles
from executor_service.backends.torch_backend.cuda.layout.rows import Tiling, cut
from executor_service.backends.torch_backend.cuda.layout.step_buffer import StepBuffer, StepShape, numbers_of
from executor_service.backends.torch_backend.cuda.linear import skinny_gemm
from executor_service.backends.torch_backend.cuda.run.device_runner import DeviceRunner
from executor_service.backends.torch_backend.cuda.run.graphs import shapes_of
from executor_service.backends.torch_backend.model.model import Model
from executor_service.backends.torch_backend.ops.page_format import LARGEST
from executor_service.backends.torch_backend.ops.quantized import Format, Fp8, Int8
from executor_service.backends.torch_backend.ops.row_tensors import LOGITS_ROWS
from tests.triton.dry.fake_device import DEVICE, PROCESSORS, CrossingError, fake_device, fake_runner, watched

BF16 = torch.bfloat16
RUNS: list[tuple[str, torch.dtype, Format | None]] = [
    ("Qwen3-8B", BF16, None),
    ("Qwen3-8B", BF16, Int8()),
    ("Qwen3-8B", BF16, Fp8()),
    ("Qwen3-8B", torch.float16, None),
    ("Qwen3-8B", torch.float32, None),
    ("Qwen3-0.6B", BF16, None),  # its output layer is its embedding
    ("Qwen3-30B-A3B", BF16, None),
]
OWN_ROWS = skinny_gemm.MAX_ROWS, skinny_gemm.NARROW_ROWS  # whose products have kernels of their own
MAX_ROWS, MAX_TOKENS, PAGES, SLOTS = 1024, 8192, 25_001, 8


def buffered(runner: DeviceRunner, shape: StepShape) -> Callable[[], object]:
    """A step of this shape, as it is captured."""
    buffer = torch.zeros(numbers_of(shape), dtype=torch.int32, device=DEVICE)
    step = StepBuffer(buffer, shape, runner._tiling, PROCESSORS)
    return lambda: runner._compute(step)


def shapes(model: Model, tiling: Tiling) -> list[StepShape]:
    return shapes_of(MAX_ROWS, MAX_TOKENS, 16, model.spec.context_length, tiling, SLOTS)


@pytest.mark.parametrize(("name", "dtype", "form"), RUNS)
def test_what_is_captured_neither_reads_from_the_device_nor_sends_to_it(
    name: str, dtype: torch.dtype, form: Format | None
) -> None:
    with fake_device():
        model, runner = fake_runner(name, dtype, form, layers=1, pages=100)
        assert model.capturable
        every = shapes(model, runner._tiling)
        operations = defaultdict(set)
        for shape in every if (name, dtype, form) == RUNS[0] else every[::13]:
            watch = watched(buffered(runner, shape))
            few = tuple(shape.tokens <= most for most in OWN_ROWS)
            kind = few, shape.long_parts, -(-shape.outputs // LOGITS_ROWS), bool(shape.adapted_tiles)
            operations[kind].add(frozenset(watch.operations.items()))
    assert all(len(found) == 1 for found in operations.values())  # they do not depend on sizes


@pytest.mark.parametrize("form", [None, Int8(), Fp8()], ids=["bf16", "int8", "fp8"])
def test_a_captured_step_of_few_tokens_leaves_no_product_to_libraries(form: Format | None) -> None:
    with fake_device():
        model, runner = fake_runner("Qwen3-8B", BF16, form, layers=1, pages=100)
        products = {
            shape.tokens: [name for name in watched(buffered(runner, shape)).operations if "mm" in name]
            for shape in shapes(model, runner._tiling)
            if not shape.adapted_tiles
        }
    most = skinny_gemm.NARROW_ROWS if form is None else skinny_gemm.MAX_ROWS
    assert {tokens for tokens, found in products.items() if not found} == {n for n in products if n <= most}
    assert most in products


@pytest.mark.parametrize("pages", LARGEST)
def test_steps_over_pages_of_8_bits_are_captured_too(pages: torch.dtype) -> None:
    with fake_device():
        model, runner = fake_runner("Qwen3-8B", BF16, None, pages, layers=1, pages=100)
        for shape in shapes(model, runner._tiling)[::13]:
            watched(buffered(runner, shape))


FAULTS: dict[str, Callable[[torch.Tensor], object]] = {
    "a number is read": lambda h: float(h.sum()),
    "a list is read": lambda h: h.tolist(),
    "a truth value is read": lambda h: bool((h > 0).all()),
    "a copy to the host": lambda h: h.cpu(),
    "a mask as an index": lambda h: h[h > 0],
    "places of a mask": lambda h: (h > 0).nonzero(),
    "a length that follows from contents": lambda h: torch.repeat_interleave(h[0].int()),
    "an array is sent": lambda h: torch.from_numpy(np.zeros(4, np.float32)).to(h.device),
    "a list as an index": lambda h: h[[0]],
    "an index on the host": lambda h: h[torch.arange(1)],
    "a tensor on the host as an operand": lambda h: h + torch.ones(h.shape[-1]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_a_graph_could_not_repeat_is_found(fault: str) -> None:
    with fake_device():
        model, runner = fake_runner("Qwen3-0.6B", BF16, None, layers=1, pages=100)
        logits = model.logits

        def faulty(hidden: torch.Tensor) -> torch.Tensor:
            FAULTS[fault](hidden)
            return logits(hidden)

        step = buffered(runner, shapes(model, runner._tiling)[0])
        watched(step)
        model.logits = faulty  # type: ignore[method-assign]
        # torch's builds for CPU say of some reads that they lack CUDA: whatever is raised, it is found.
        with pytest.raises((CrossingError, RuntimeError, NotImplementedError)):
            watched(step)


def verifications(count: int, each: int, keys: int, tiling: Tiling) -> StepShape:
    """Of so many rows that share most of their keys."""
    items = count * -(-each // tiling.short.block) * -(-keys // tiling.short.split)
    parts = -(-items // (tiling.short.part - keys // tiling.short.split))
    return StepShape(count * each, count, count * each, items, parts, 0, 0, count * -(-keys // 16))


def adapted(shape: StepShape) -> StepShape:
    """The same, where any token may have any slot."""
    tiles = max_tiles(shape.tokens, SLOTS)
    return shape._replace(adapted_tokens=shape.tokens, adapted_tiles=tiles)


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-0.6B"])
def test_graphs_and_the_largest_steps_fit_into_the_memory_that_is_left_to_them(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_device():
        model, runner = fake_runner(name, BF16, None, layers=2, pages=PAGES)
        tiling = runner._tiling
        # As `uncached.step_bytes` measures it on a device, which also keeps all hidden states.
        zero, count = np.array([0], np.int32), np.array([MAX_TOKENS], np.int32)
        work = cut(zero, count, zero, tiling)
        items, parts = len(work["long_items"]), len(work["long_bounds"]) - 1
        prompt = StepShape(MAX_TOKENS, 1, LOGITS_ROWS, 0, 0, items, parts, MAX_TOKENS // 16)
        reserved = watched(buffered(runner, prompt)).peak_bytes
        every = {shape: watched(buffered(runner, shape)).peak_bytes for shape in shapes(model, tiling)}
        largest = max(every, key=lambda shape: every[shape])
        kept = sum(shape.outputs for shape in every) * (2 * model.spec.hidden_size + 8)
        graphs = every[largest] + kept + 4 * max(map(numbers_of, every))
        steps = {
            f"a prompt of {MAX_TOKENS} tokens with an adapter": adapted(prompt),
            "1,024 decodes on 1,024 keys, with adapters": adapted(verifications(1024, 1, 1024, tiling)),
            "1,024 decodes on 1,024 keys": verifications(1024, 1, 1024, tiling),
            "1,024 decodes on a shared prefix of 30,000": verifications(1024, 1, 30_000, tiling),
            "512 verifications of 9 on a shared prefix of 30,000": verifications(512, 9, 30_000, tiling),
        }
        peaks = {what: watched(buffered(runner, shape)).peak_bytes for what, shape in steps.items()}
    with capsys.disabled():
        print(f"\n{name}, bf16: MB at once")
        print(f"  {reserved / 1e6:7.0f}  reserved for prompts of {MAX_TOKENS} tokens")
        sizes = f"{largest.tokens} tokens and {largest.outputs} outputs"
        print(f"  {graphs / 1e6:7.0f}  all graphs; the largest has {sizes}")
        for what, peak in peaks.items():
            print(f"  {peak / 1e6:7.0f}  {what}")
    assert graphs <= memory._MIN_SPARE_BYTES
    assert max(peaks.values()) <= reserved + memory._MIN_SPARE_BYTES - graphs
