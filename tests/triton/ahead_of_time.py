"""Launches of the CUDA kernels, for shapes of models that the worker serves; compiled without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from executor_service.backends.torch_backend.cuda.attention.attention import attention_launches
from executor_service.backends.torch_backend.cuda.attention.pipelines import (
    AttentionDevice,
    Pipelines,
)
from executor_service.backends.torch_backend.cuda.attention.rotary import rotary_launch
from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from executor_service.backends.torch_backend.cuda.layout.adapted_tokens import TILE_FIELDS, AdaptedTokens
from executor_service.backends.torch_backend.cuda.layout.resolve import (
    HostRows,
    Resolved,
    TokenPages,
    items_launch,
    resolve_launch,
)
from executor_service.backends.torch_backend.cuda.layout.row_ends import RowEnds, accept_launch
from executor_service.backends.torch_backend.cuda.layout.rows import (
    ITEM_FIELDS,
    AttentionRows,
    RowWork,
    Tiling,
)
from executor_service.backends.torch_backend.cuda.layout.step_buffer import PickRows
from executor_service.backends.torch_backend.cuda.linear.experts import (
    ExpertGroups,
    group_launches,
    weigh_launch,
)
from executor_service.backends.torch_backend.cuda.linear.few_experts import few_down_launch, few_gated_launch
from executor_service.backends.torch_backend.cuda.linear.low_rank import RECORD_FIELDS, TableChange
from executor_service.backends.torch_backend.cuda.linear.packed import (
    INPUTS,
    PackedWeight,
    packed_rows_launch,
    unpack_launch,
)
from executor_service.backends.torch_backend.cuda.linear.pointwise import gated_launch, norm_launch
from executor_service.backends.torch_backend.cuda.linear.quantized import round_launch, scale_launch
from executor_service.backends.torch_backend.cuda.linear.rank_sums import sum_launch
from executor_service.backends.torch_backend.cuda.linear.routing import route_launch
from executor_service.backends.torch_backend.cuda.linear.skinny_gemm import (
    few_rows_launch,
    few_scaled_rows_launch,
    new_arrivals,
)
from executor_service.backends.torch_backend.cuda.picking.exclude import exclude_launch
from executor_service.backends.torch_backend.cuda.picking.late_picks import publish_launch
from executor_service.backends.torch_backend.cuda.picking.listed_tokens import (
    Biases,
    Stops,
    bias_launch,
    stop_launches,
)
from executor_service.backends.torch_backend.cuda.picking.logprobs import (
    ChosenTokens,
    Measures,
    measure_launches,
)
from executor_service.backends.torch_backend.cuda.picking.penalties import Histories, penalty_launches
from executor_service.backends.torch_backend.cuda.picking.pick import pick_launches
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.ops.kernels import AttentionWeights
from executor_service.backends.torch_backend.ops.page_format import LARGEST, LayerCache, plain_cache
from executor_service.backends.torch_backend.ops.quantized import Fp8, Int8

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
"""Of one program, by architecture; a multiprocessor has 1 KiB more."""
DEPENDENT = 90
"""The architecture with dependent launches; some shapes' kernels are compiled for them once each."""


@dataclass(frozen=True)
class Shape:
    """The heads and the vocabulary of a model that the worker serves, and the format of its pages."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    vocabulary: int = 151_936
    window: int = 0
    pages: torch.dtype | None = None  # of 8 bits; None: `dtype`
    experts: int = 0  # of a mixture
    cap: float = 0.0  # of scores; 0: none
    sinks: bool = False

    @property
    def architectures(self) -> tuple[int, ...]:
        """For which its kernels are compiled: those of 89 differ from those of 86 by fp8 alone."""
        return (89, 90) if self.pages == torch.float8_e4m3fn else (80, 86, 90)

    def cache(self) -> LayerCache:
        """Pages of 16 tokens."""
        dtype = self.pages or self.dtype
        return plain_cache(9, 16, self.kv_heads, self.head_dim, dtype, torch.device("meta"))


# SmolLM2; Qwen3-8B and -4B, Llama-3-8B
SHAPES = [Shape(9, 3, 64, vocabulary=49_152), Shape(32, 8, 128)]
# Of which attention alone differs: Mistral-7B-v0.1, Gemma 3 1B and 4B, Gemma 2 2B, gpt-oss
ATTENTION_SHAPES = [
    Shape(32, 8, 128, window=4096), Shape(4, 1, 256, window=512), Shape(8, 4, 256),
    Shape(8, 4, 256, torch.float32), Shape(8, 4, 256, window=4096, cap=50.0),
    Shape(64, 8, 64, window=128, sinks=True),
]  # fmt: skip
# Of which attention and what writes pages differ
PAGE_SHAPES = [Shape(32, 8, 128, pages=pages) for pages in LARGEST]
MORE_PAGE_SHAPES = [
    Shape(*heads, dtype, pages=pages)
    for heads in ((9, 3, 64), (28, 4, 128), (32, 8, 128), (8, 4, 256))
    for dtype in (torch.bfloat16, torch.float16)
    for pages in LARGEST
]
# Of which the kernels are compiled that do not depend on heads: Qwen3-30B-A3B
MIXTURES = [Shape(32, 4, 128, experts=128)]
# Whose kernels are compiled for dependent launches too: between them they have all
DEPENDENT_SHAPES = [SHAPES[0], *MIXTURES]
MORE_MIXTURES = [
    Shape(32, 4, 128, dtype, experts=64) for dtype in (torch.bfloat16, torch.float16, torch.float32)
]
# Qwen3-0.6B, -14B and -MoE; Qwen2-7B; multi-head attention; fp16
MORE_SHAPES = [
    Shape(16, 8, 128), Shape(40, 8, 128), Shape(32, 4, 128), Shape(28, 4, 128), Shape(32, 32, 64),
    Shape(32, 32, 128), Shape(9, 3, 64, torch.float16, 50_257), Shape(32, 8, 128, torch.float16),
    Shape(32, 8, 128, torch.float32),
]  # fmt: skip


def late_launches(
    logits: torch.Tensor, pages: torch.Tensor, numbers: torch.Tensor, shares: torch.Tensor
) -> Iterator[tuple[str, Launch]]:
    """Those after a step; numbers int32 and shares fp32 [rows of logits]."""
    history = TokenPages(len(pages), pages.shape[1], torch.device("meta"))
    items = torch.zeros(64, ITEM_FIELDS, dtype=torch.int32, device="meta")
    work = RowWork(items, numbers, Tiling.of(4, torch.bfloat16).short)
    ends = RowEnds(numbers, numbers)
    step = HostRows(*[numbers] * len(HostRows.__slots__))
    yield "resolve", resolve_launch(Resolved(*[numbers] * 6), step, ends, history)
    yield "resolve items", items_launch(AttentionRows(0, numbers, work, work), step, ends)
    yield "accept", accept_launch(ends, *[numbers] * 7)
    histories = Histories(*[numbers] * 4, *[shares] * 3)
    counts = torch.empty(logits.shape, dtype=torch.int32, device="meta")
    yield from zip(
        ("count tokens", "penalties"), penalty_launches(logits, history.ids, histories, counts), strict=True
    )
    yield "bias", bias_launch(logits, Biases(numbers, shares, numbers, numbers))
    kept = torch.empty(len(logits), 9, device="meta")
    stops = Stops(numbers, numbers, numbers)
    yield from zip(("mask stop ids", "unmask"), stop_launches(logits, stops, kept), strict=True)
    yield "publish", publish_launch(numbers, numbers, numbers)
    measures = Measures.empty(len(logits), 5, torch.device("meta"))
    top = logits[:, :5].contiguous(), torch.empty(len(logits), 5, dtype=torch.int64, device="meta")
    chosen = ChosenTokens(numbers, numbers, numbers)
    launches = measure_launches(logits, chosen, measures, top)
    yield from zip(("survey, measured", "norm, measured", "rank"), launches, strict=True)


def launches(shape: Shape, architecture: int) -> Iterator[tuple[str, Launch]]:
    """The kernels of one step of this model that depend on heads or vocabulary, with pages of 16 tokens."""
    yield from basics(shape, architecture)
    numbers = torch.zeros(8, dtype=torch.int32, device="meta")
    out = torch.empty(4096, shape.heads * shape.head_dim, dtype=shape.dtype, device="meta")
    yield "rotary", rotary(shape)
    logits, shares = torch.empty(8, shape.vocabulary, device="meta"), torch.empty(8, device="meta")
    picks = PickRows(shares, numbers, numbers, numbers, shares, shares)
    yield from zip(("survey", "pick"), pick_launches(logits, picks, numbers, numbers), strict=True)
    words = torch.zeros(8, -(-shape.vocabulary // 32), dtype=torch.int32, device="meta")
    yield "exclude", exclude_launch(logits, words, numbers)
    yield from late_launches(logits, shape.cache().k, numbers, shares)
    for form in (Int8(), Fp8()) if architecture >= 89 else (Int8(),):
        rounded = torch.empty(out.shape, dtype=form.dtype, device="meta")
        yield f"round, {type(form).__name__.lower()}", round_launch(out, rounded, shares, form)
    sums = torch.empty(out.shape, dtype=torch.int32, device="meta")
    yield "scale, int8", scale_launch(sums, out, shares, shares)


def basics(shape: Shape, architecture: int) -> Iterator[tuple[str, Launch]]:
    """Of these, those that differ between architectures, or whose memory accesses are checked."""
    yield from attention(shape, architecture)
    yield from adapters(shape)
    if shape.dtype != torch.float32:
        yield from few_rows(shape, architecture)


def attention(shape: Shape, architecture: int) -> Iterator[tuple[str, Launch]]:
    """The kernels of attention alone."""
    heads = torch.empty(
        4096, shape.heads + 2 * shape.kv_heads, shape.head_dim, dtype=shape.dtype, device="meta"
    )
    out = torch.empty(4096, shape.heads * shape.head_dim, dtype=shape.dtype, device="meta")
    numbers = torch.zeros(2, dtype=torch.int32, device="meta")
    items = torch.zeros(64, ITEM_FIELDS, dtype=torch.int32, device="meta")
    group, windows = shape.heads // shape.kv_heads, (shape.window,)
    tiling = Tiling.of(group, shape.dtype, shape.head_dim, windows, shape.kv_heads)
    short, long = (RowWork(items, numbers, how) for _, how in tiling.classes)
    rows = AttentionRows(shape.window, numbers, short, long)
    device = AttentionDevice(Pipelines.of(SHARED_BYTES[architecture] + 1024), lambda _: 1)
    q = heads[:, : shape.heads]
    sinks = torch.zeros(shape.heads * shape.sinks, device="meta")
    inputs = out, q, shape.cache(), rows, numbers, shape.head_dim**-0.5, device
    made = attention_launches(*inputs, shape.cap, sinks)
    yield from zip(("attention, short", "attention, long"), made, strict=True)


def rotary(shape: Shape) -> Launch:
    """The kernel that writes pages."""
    numbers = torch.zeros(8, dtype=torch.int32, device="meta")
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = torch.empty(4096, width, dtype=shape.dtype, device="meta")
    angles, norm = torch.empty(32768, shape.head_dim // 2), torch.empty(shape.head_dim)
    scales = torch.empty(32768), norm
    weights = AttentionWeights(
        shape.heads, shape.kv_heads, shape.head_dim, 1e-6, angles, angles, norm, norm, 1.0, 0, *scales
    )
    return rotary_launch(qkv, shape.cache(), numbers, numbers, numbers, weights)


def over_pages(shape: Shape, architecture: int) -> Iterator[tuple[str, Launch]]:
    """The kernels that read and write pages."""
    yield from attention(shape, architecture)
    yield "rotary", rotary(shape)


def adapters(shape: Shape) -> Iterator[tuple[str, Launch]]:
    """The kernels of adapters, of queries, keys and values."""
    hidden, width = shape.heads * shape.head_dim, (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    x, out = (torch.empty(512, n, dtype=shape.dtype, device="meta") for n in (hidden, width))
    numbers = torch.zeros(TILE_FIELDS, dtype=torch.int32, device="meta")
    table = torch.zeros(8, 7, RECORD_FIELDS, dtype=torch.int64, device="meta")
    change = TableChange(AdaptedTokens(numbers, numbers, numbers), table, 0, 3)
    shrunk = torch.empty(2, 512, 3, 256, device="meta")
    yield from zip(("shrink", "expand"), change.launches(x, out, shrunk), strict=True)


def whatever_the_heads(shape: Shape) -> Iterator[tuple[str, Launch]]:
    """The kernels that do not depend on heads; a token has 8 experts, of width 768."""

    def new(*size: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    hidden, width = new(4096, 2048), new(2048, dtype=torch.float32)
    for add in (False, True):
        added = ", added" if add else ""
        yield f"norm{added}", norm_launch(hidden, width, hidden, 1e-6, add=add)
        yield f"sum of ranks{added}", sum_launch(new(2, *hidden.shape), hidden, add=add)
    for activation in Activation:
        yield f"gated, {activation.name.lower()}", gated_launch(hidden, hidden[:, :1024], activation)
    shares, chosen = new(4096, 8, dtype=torch.float32), new(4096, 8, dtype=torch.int64)
    yield "route", route_launch(hidden[:, : shape.experts], shares, chosen, renormalize=True)
    groups = ExpertGroups.empty(hidden, chosen, shape.experts)
    yield from zip(("place", "spread"), group_launches(hidden, chosen, groups), strict=True)
    yield "weigh", weigh_launch(groups.rows, groups.places, shares, hidden)
    yield from products(shape)


def products(shape: Shape) -> Iterator[tuple[str, Launch]]:
    """Of these, the products, whose pipelines differ between architectures."""
    yield from packed(every=shape not in MIXTURES)
    if shape.dtype != torch.float32:

        def new(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=shape.dtype, device="meta")

        hidden, chosen = new(1, 2048), torch.empty(1, 8, dtype=torch.int64, device="meta")
        gate_up, down = new(shape.experts, 1536, 2048), new(shape.experts, 2048, 768)
        inner, rows = new(8, 768), ExpertGroups.empty(hidden, chosen, shape.experts).rows
        yield "few rows, gated", few_gated_launch(hidden, chosen, gate_up, inner, Activation.SILU)
        yield "few rows, down", few_down_launch(inner, chosen, down, rows)


def few_rows(shape: Shape, architecture: int) -> Iterator[tuple[str, Launch]]:
    """The products of few rows: of the layer after attention, and of the head."""
    hidden, rows = shape.heads * shape.head_dim, 3

    def new(n: int, k: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
        return torch.empty(n, k, dtype=dtype, device="meta")

    x, weight, out = new(rows, hidden), new(hidden, hidden), new(rows, hidden)
    arrivals = new_arrivals(torch.device("meta"))
    yield "few rows", few_rows_launch(x, weight, None, out, arrivals, add=True)
    bias, ups = new(1, hidden)[0], new(8 * hidden, hidden)
    yield "few rows, bias", few_rows_launch(x, weight, bias, out, arrivals)
    inner, silu = new(rows, 4 * hidden), Activation.SILU
    yield "few rows, gate", few_rows_launch(x, ups, None, inner, arrivals, activation=silu)
    narrow, down = new(rows, 1024), new(1024, hidden)
    yield "few rows, in parts", few_rows_launch(x, down, None, narrow, arrivals, add=True)
    logits = new(rows, shape.vocabulary, torch.float32)
    yield "few rows, head", few_rows_launch(x, new(shape.vocabulary, hidden), None, logits, arrivals)
    wide = torch.float32
    for form in (Int8(), Fp8()) if architecture >= 89 else (Int8(),):
        numbers, weight = new(form.digits * rows, hidden, form.dtype), new(hidden, hidden, form.dtype)
        name = f"few rows, {type(form).__name__.lower()}"
        yield name, few_scaled_rows_launch(numbers, new(rows, 1, wide), weight, new(1, hidden, wide), out)


def packed(*, every: bool) -> Iterator[tuple[str, Launch]]:
    """The products over 4 bits, of GPTQ in groups of 128, Q4_1 and Q4_0, and what dequantizes them.

    Without `every` those of GPTQ alone, of few rows and of most rows, and Q4_1's of few rows.
    """
    size, meta = 4096, torch.device("meta")
    arrivals = new_arrivals(meta)
    for group, least in ((32, False), (32, True), (128, False)) if every else ((32, True), (128, False)):
        words = torch.empty(size // 64, size // group, 64, dtype=torch.int32, device=meta)
        span = min(group, INPUTS)
        codes = torch.empty(size // 64, size // span, 64, span // 2, dtype=torch.uint8, device=meta)
        weight = PackedWeight(size, size, span, group // span, codes, words, words.float() if least else None)
        name = f"4 bits, {group}{', minima' if least else ''}"
        for rows in (3, 16, 64) if every else (3,):
            x, out = (torch.empty(rows, size, dtype=torch.bfloat16, device=meta) for _ in range(2))
            kind = "few rows" if rows == 3 else f"{rows} rows"
            yield f"{kind}, {name}", packed_rows_launch(x, weight, None, out, arrivals, add=True)
        if every:
            yield f"unpack, {name}", unpack_launch(weight, out)
    silu = Activation.SILU
    for rows in (3, 64) if every else (64,):
        x, inner = (torch.empty(rows, k, dtype=torch.bfloat16, device=meta) for k in (size, size // 2))
        launch = packed_rows_launch(x, weight, None, inner, arrivals, activation=silu)
        yield f"{'few' if rows == 3 else rows} rows, 4 bits, gate", launch


def compiled_launches(shape: Shape, architecture: int) -> Iterator[tuple[str, Launch]]:
    """Those of a shape that are compiled."""
    if shape.pages is not None:
        return over_pages(shape, architecture)
    if shape in ATTENTION_SHAPES:
        return attention(shape, architecture)
    every = architecture == DEPENDENT or shape in MORE_SHAPES + MORE_MIXTURES
    if shape.experts:
        return whatever_the_heads(shape) if every else products(shape)
    return (launches if every else basics)(shape, architecture)
