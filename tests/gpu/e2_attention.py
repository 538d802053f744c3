"""E2: paged attention of the 8B shape: our Triton kernel, SDPA on dense keys, FlashInfer if it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.cuda import get_device_properties
from torch.nn import functional

from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from executor_service.backends.torch_backend.ops.page_format import SCALE_DTYPE, LayerCache
from tests.gpu.bench import PAGE, Bench, Case
from tests.gpu.shapes import spec_of
from tests.gpu.timing import device_ms
from tests.triton.mended import INTERPRETED, mended_interpreter

if TYPE_CHECKING:
    from executor_service.backends.torch_backend.cuda.attention.pipelines import Pipelines
    from executor_service.backends.torch_backend.cuda.layout.rows import Tiling

ROUNDING = 0.02  # of the largest value
_POOL = 128  # sequences of the same length, 4 MiB each at 1,024 tokens: more than the L2 cache holds
Attend = Callable[[int], torch.Tensor]
"""The n-th set of rows, to the result [rows * q_len, heads * head_dim]."""


@dataclass(frozen=True)
class Rows:
    """Sets of `count` sequences out of a pool, each with `context` keys, whose last `q_len` tokens attend."""

    spec: ModelSpec
    device: torch.device
    pool: int
    count: int
    context: int
    q_len: int
    q: torch.Tensor  # [count, heads, q_len, head_dim]
    k: torch.Tensor  # [pool, kv_heads, context, head_dim]
    v: torch.Tensor

    @classmethod
    def random(
        cls, spec: ModelSpec, device: torch.device, pool: int, count: int, context: int, q_len: int
    ) -> Rows:
        def tensor(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        keys = (pool, spec.kv_heads, context, spec.head_dim)
        q = tensor(count, spec.heads, q_len, spec.head_dim)
        return cls(spec, device, pool, count, context, q_len, q, tensor(*keys), tensor(*keys))

    @property
    def sets(self) -> int:
        return self.pool // self.count

    @property
    def pages_of_a_row(self) -> int:
        return self.context // PAGE

    def flat_q(self) -> torch.Tensor:
        """[count * q_len, heads, head_dim]."""
        return self.q.transpose(1, 2).flatten(0, 1).contiguous()

    def paged(self, dense: torch.Tensor) -> torch.Tensor:
        """[1 + pool * pages_of_a_row, PAGE, kv_heads, head_dim], as `tables` has them; page 0 is scratch."""
        pages = dense.transpose(1, 2).reshape(-1, PAGE, self.spec.kv_heads, self.spec.head_dim)
        scattered = pages.new_full((1 + len(pages), *pages.shape[1:]), torch.nan)
        scattered[self.tables().flatten().long()] = pages
        return scattered

    def tables(self) -> torch.Tensor:
        """Block tables of the pool, int32 [pool, pages_of_a_row]: as in a service, in no order."""
        count = self.pool * self.pages_of_a_row
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
        return (1 + order).view(self.pool, -1).to(self.device)


def run(bench: Bench) -> Iterator[Case]:
    """A case for each way and size; `error` is the largest difference from SDPA in fp32.

    It fails at the end if ours is further off than rounding to bf16 explains.
    """
    wrong = []
    with mended_interpreter() if INTERPRETED else nullcontext():
        for case in _cases(bench):
            yield case
            right = "skipped" in case or ("error" in case and case["error"] <= ROUNDING * case["largest"])
            if case["way"] == "triton" and not right:
                wrong.append(case)
    if wrong:
        raise AssertionError(f"attention is wrong: {wrong}")


def _cases(bench: Bench) -> Iterator[Case]:
    spec = spec_of("Qwen3-8B", dry=bench.dry)
    context = bench.pick(1024, 64)
    sizes = [(count, context, 1) for count in bench.pick((1, 32, 128), (1, 4))]
    # Verifications, a prompt, and a turn of 100 tokens after a long prefix.
    sizes += [(32, context, 5), (1, 2048, 2048), (1, 30_000, 100)] if not bench.dry else [(1, 32, 32)]
    for count, length, q_len in sizes:
        pool = bench.pick(_POOL if q_len == 1 else max(32 if length < 30_000 else 4, count), 4)
        rows = Rows.random(spec, bench.device, pool, count, length, q_len)
        exact = sdpa(rows, torch.float32)(0)
        for name, make in _WAYS.items():
            case: Case = {"way": name, "rows": count, "context": length, "q_len": q_len}
            if reason := missing(name, bench):
                yield case | {"skipped": reason}
                continue
            try:
                yield case | measured(bench, rows, make(rows), exact)
            except Exception as error:  # one way that fails leaves the others
                yield case | {"failed": f"{type(error).__name__}: {error}"[:1000]}


def measured(bench: Bench, rows: Rows, attend: Attend, exact: torch.Tensor) -> Case:
    error = (attend(0).float() - exact).abs().max().item()
    sets = min(rows.sets, 32)
    ms = device_ms([lambda n=n: attend(n) for n in range(sets)], bench.device)  # type: ignore[misc]
    spec, tokens = rows.spec, rows.count * rows.q_len
    read = 2 * 2 * rows.count * rows.context * spec.kv_heads * spec.head_dim + 4 * rows.q.numel()
    pairs = tokens * (rows.context - (rows.q_len - 1) / 2)
    flops = 4 * pairs * spec.heads * spec.head_dim
    floor_ms = 1e3 * max(read / bench.machine.bytes_per_s, flops / bench.machine.flop_per_s)
    return {
        "ms": ms,
        "gb_s": read / ms / 1e6,
        "tflop_s": flops / ms / 1e9,
        "fraction": floor_ms / ms,
        "error": error,
        "largest": exact.abs().max().item(),
    }


def missing(way: str, bench: Bench) -> str:
    if way == "flashinfer" and (find_spec("flashinfer") is None or bench.device.type != "cuda"):
        return "flashinfer is not installed, or there is no GPU"
    if way == "triton" and find_spec("triton") is None:
        return "triton is not installed"
    if way == "triton" and bench.device.type != "cuda" and not INTERPRETED:
        return "no GPU, and TRITON_INTERPRET is not 1"
    return ""


def sdpa(rows: Rows, dtype: torch.dtype = torch.bfloat16) -> Attend:
    """torch's own on contiguous keys."""
    q, mask = rows.q.to(dtype), None
    if 1 < rows.q_len < rows.context:
        mask = torch.ones(rows.q_len, rows.context, dtype=torch.bool, device=rows.device)
        mask = mask.tril(rows.context - rows.q_len)

    def attend(n: int) -> torch.Tensor:
        part = slice(n * rows.count, (n + 1) * rows.count)
        out = functional.scaled_dot_product_attention(
            q,
            rows.k[part].to(dtype),
            rows.v[part].to(dtype),
            attn_mask=mask,
            is_causal=rows.q_len == rows.context,
            enable_gqa=True,
        )
        return out.transpose(1, 2).reshape(-1, rows.spec.heads * rows.spec.head_dim)

    return attend


def paged(
    rows: Rows, change: Callable[[Tiling, Pipelines], tuple[Tiling, Pipelines]] | None = None
) -> Attend:
    """Ours: pages read in place. `change` makes other cuts and pipelines of the shipped ones."""
    from executor_service.backends.torch_backend.cuda.attention.attention import (
        attention_launches,
        new_arrivals,
    )
    from executor_service.backends.torch_backend.cuda.attention.pipelines import attention_device
    from executor_service.backends.torch_backend.cuda.layout.rows import (
        SHORT_TOKENS,
        Tiling,
        attention_rows,
        cut,
    )

    q, scales = rows.flat_q(), torch.empty(0, dtype=SCALE_DTYPE, device=rows.device)
    cache = LayerCache(rows.paged(rows.k), rows.paged(rows.v), scales)
    tables = rows.tables()
    counts = np.full(rows.count, rows.q_len, np.int32)
    heads, kv_heads = rows.spec.heads, rows.spec.kv_heads
    tiling = Tiling.of(heads // kv_heads, torch.bfloat16, rows.spec.head_dim, kv_heads=kv_heads)
    how = attention_device(rows.device)
    if change is not None:
        tiling, pipelines = change(tiling, how.pipelines)
        how = replace(how, pipelines=pipelines)
    table_starts = np.arange(rows.count, dtype=np.int32) * np.int32(rows.pages_of_a_row)
    arrays = cut(rows.context - counts, counts, table_starts, tiling)
    parts = {name: torch.from_numpy(array).to(rows.device) for name, array in arrays.items()}
    processors = 0
    if rows.device.type == "cuda" and rows.q_len <= SHORT_TOKENS:  # as in a graph, with room for more work
        parts["short_items"] = functional.pad(parts["short_items"], (0, 0, 0, tiling.short.part))
        processors = get_device_properties(rows.device).multi_processor_count
    sets = [
        attention_rows(tables[n * rows.count : (n + 1) * rows.count].flatten(), parts, tiling, processors)[0]
        for n in range(rows.sets)
    ]
    arrivals, scale = new_arrivals(rows.spec.kv_heads, rows.device), rows.spec.head_dim**-0.5

    def attend(n: int) -> torch.Tensor:
        out = q.new_empty(len(q), heads * rows.spec.head_dim)
        for launch in attention_launches(out, q, cache, sets[n], arrivals, scale, how):
            launch.run()
        return out

    return attend


def _flashinfer(rows: Rows) -> Attend:
    """FlashInfer's wrapper of paged prefill, which takes decodes too; planned before the clock starts."""
    import flashinfer

    spec, q = rows.spec, rows.flat_q()
    pages = rows.paged(rows.k), rows.paged(rows.v)

    def numbers(count: int, step: int) -> torch.Tensor:
        return step * torch.arange(count, dtype=torch.int32, device=rows.device)

    wrappers = []
    for n in range(min(rows.sets, 32)):
        workspace = torch.empty(64 << 20, dtype=torch.uint8, device=rows.device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            numbers(rows.count + 1, rows.q_len),
            numbers(rows.count + 1, rows.pages_of_a_row),
            rows.tables()[n * rows.count : (n + 1) * rows.count].flatten(),
            numbers(rows.count, 0) + PAGE,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            PAGE,
            causal=True,
            q_data_type=torch.bfloat16,
        )
        wrappers.append(wrapper)
    return lambda n: wrappers[n].run(q, pages).flatten(1)


_WAYS: dict[str, Callable[[Rows], Attend]] = {"triton": paged, "sdpa": sdpa, "flashinfer": _flashinfer}
