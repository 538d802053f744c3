"""Compiles the CUDA kernels for several architectures without a GPU and says what came out of it.

`python -m tests.triton.ahead_of_time [--all]` prints a line for each kernel, and fails where one spills
registers or does not fit its multiprocessor, where attention, adapters and products of few rows lack matrix
instructions, where attention loads too few tiles of keys ahead, and products of few rows too few weights, and
where adapters read their factors in small parts. The kernels are those of the launches that the worker makes.
For 9.0 each is also compiled for dependent launches, and must wait for the kernel before it; before that it
may ask for weights, which products of few rows must, and for nothing else.
"""

from __future__ import annotations

import contextlib
import io
import math
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from executor_service.backends.torch_backend.cuda.attention.attention import attention_launches
from executor_service.backends.torch_backend.cuda.attention.pipelines import (
    AttentionDevice,
    Multiprocessor,
    Pipelines,
)
from executor_service.backends.torch_backend.cuda.attention.rotary import rotary_launch
from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from executor_service.backends.torch_backend.cuda.layout.adapted_tokens import TILE_FIELDS, AdaptedTokens
from executor_service.backends.torch_backend.cuda.layout.resolve import (
    HostRows,
    Resolved,
    items_launch,
    resolve_launch,
)
from executor_service.backends.torch_backend.cuda.layout.row_ends import RowEnds, accept_launch
from executor_service.backends.torch_backend.cuda.layout.rows import ITEM_FIELDS, AttentionRows, Tiling, Work
from executor_service.backends.torch_backend.cuda.layout.step_buffer import PickRows
from executor_service.backends.torch_backend.cuda.layout.token_pages import TokenPages
from executor_service.backends.torch_backend.cuda.linear.experts import Groups, group_launch, weigh_launch
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
from executor_service.backends.torch_backend.ops.layer_cache import LayerCache
from executor_service.backends.torch_backend.ops.page_format import LARGEST, plain_cache
from executor_service.backends.torch_backend.ops.quantized import Fp8, Int8
from tests.triton.disorder import disorder, prefetches

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
"""Of one program, by architecture; a multiprocessor has 1 KiB more."""
BUFFERS = {80: (4, 3), 86: (2, 3), 89: (2, 3), 90: (4, 4)}
"""Tiles of K that attention has room for, at least, in short and in long rows."""
_FEW_BUFFERS = 3  # enough in short rows where pages are looked up ahead: their programs are smaller
_CONVERTED_BUFFERS = 3  # the same of 8 bits, where to convert a tile takes one of them
_FP32_SPILLED = 128  # bytes of a thread
_SHORT_PROGRAMS = 2  # of attention's short rows, that a multiprocessor runs at once, at least
DEPENDENT = 90
"""The architecture with dependent launches; some shapes' kernels are compiled for them once each."""
_MORE_REGISTERS = 4  # of a thread, in dependent launches, at most
PROCESSORS = {80: 108, 86: 82, 89: 128, 90: 132}
MEMORY_BYTES_PER_S = {80: 2.04e12, 86: 0.94e12, 89: 1.01e12, 90: 3.35e12}
"""Of an A100, an RTX 3090, an RTX 4090 and an H100."""
LATENCY_S = 1e-6
"""From a load to its bytes while memory is busy, not less. Memory stays busy while at least this time's bytes
are on their way (Little's law)."""
_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8", torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
_BUFFERS = re.compile(r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x\d+x\d+x(?:bf16|f16|i8|f8E4M3FN)")
_WAIT = re.compile(r"ttg\.async_wait .*num = (\d+)")
_INNER_LOOP = re.compile(r"scf\.for (?:(?!scf\.for ).)*?scf\.yield", re.DOTALL)
# All threads have stored, one counts the program with release and acquire, and all learn the count from it.
_ARRIVAL = re.compile(
    r"bar\.sync(?:(?!st\.global|bar\.sync).)*atom\.global\.gpu\.acq_rel\.add(?:(?![ls][dt]\.global).)*bar\.sync",
    re.DOTALL,
)
_MATRIX = re.compile(r"^\s*(?:@\S+ )?(wgmma\.mma_async|mma\.sync)", re.MULTILINE)


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
# Of which attention alone differs: Mistral-7B-v0.1, Gemma 3 1B and 4B
ATTENTION_SHAPES = [
    Shape(32, 8, 128, window=4096), Shape(4, 1, 256, window=512), Shape(8, 4, 256),
    Shape(8, 4, 256, torch.float32),
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
    """Those behind a step; numbers int32 and shares fp32 [rows of logits]."""
    history = TokenPages(len(pages), pages.shape[1], torch.device("meta"))
    items = torch.zeros(64, ITEM_FIELDS, dtype=torch.int32, device="meta")
    work = Work(items, numbers, Tiling.of(4, torch.bfloat16).short)
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


@dataclass(frozen=True)
class Compiled:
    """What ptxas said of a kernel."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    matrix_instructions: int
    buffers: int  # tiles of K, or of weights, in shared memory; 0: no loop has a pipeline
    ahead: int  # loads that may be on their way while a tile is multiplied
    arrives: bool  # it counts finished programs in an order that memory keeps
    narrow_loads: int  # of two bytes, hence not of numbers that lie side by side at an aligned address
    disorder: str  # what is wrong with how it begins, in dependent launches; "" if nothing is
    asked: int  # addresses of weights that a thread asks for before it waits


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
    short, long = (Work(items, numbers, how) for _, how in tiling.classes)
    rows = AttentionRows(shape.window, numbers, short, long)
    device = AttentionDevice(Pipelines.of(SHARED_BYTES[architecture] + 1024), lambda _: 1)
    q = heads[:, : shape.heads]
    made = attention_launches(out, q, shape.cache(), rows, numbers, shape.head_dim**-0.5, device)
    yield from zip(("attention, short", "attention, long"), made, strict=True)


def rotary(shape: Shape) -> Launch:
    """The kernel that writes pages."""
    numbers = torch.zeros(8, dtype=torch.int32, device="meta")
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = torch.empty(4096, width, dtype=shape.dtype, device="meta")
    angles, norm = torch.empty(32768, shape.head_dim // 2), torch.empty(shape.head_dim)
    return rotary_launch(qkv, shape.cache(), numbers, numbers, numbers, angles, angles, norm, norm, 1e-6)


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
    groups = Groups.empty(hidden, chosen, shape.experts)
    yield "group", group_launch(hidden, chosen, groups)
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
        inner, rows = new(8, 768), Groups.empty(hidden, chosen, shape.experts).rows
        yield "few rows, gated", few_gated_launch(hidden, chosen, gate_up, inner, Activation.SILU)
        yield "few rows, down", few_down_launch(inner, chosen, down, rows)


def few_rows(shape: Shape, architecture: int) -> Iterator[tuple[str, Launch]]:
    """The products of few rows: of the layer behind attention, and of the head."""
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


def _specialized(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Its kernel's signature, constants and hints, as Triton's just-in-time compiler would have them."""
    signature, constants, hints = {}, dict(launch.constants), {}
    for i, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments.get(name)
        known = not launch.kernel.params[i].do_not_specialize
        if value is None or (known and isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constants.setdefault(name, 1)
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "*" + _TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            if known and (isinstance(value, torch.Tensor) or value % 16 == 0):
                hints[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, hints


def compiled(launch: Launch, architecture: int, *, dependent: bool = False) -> Compiled:
    """What Triton's just-in-time compiler would make of the launch."""
    signature, constants, hints = _specialized(launch)
    # A kernel's parameters are those of its arguments that are no constants.
    parameters = [name for name in launch.kernel.arg_names if signature[name] != "constexpr"]
    weights = [parameters.index(name) for name in ("weight",) if name in parameters]
    log = io.StringIO()
    with contextlib.redirect_stdout(log), tempfile.TemporaryDirectory() as cache, triton.knobs.cache.scope():
        triton.knobs.cache.dir = cache  # a cached kernel has no log
        triton.knobs.nvidia.dump_ptxas_log = True
        made = triton.compile(
            ASTSource(launch.kernel, signature, constants, hints),
            target=GPUTarget("cuda", architecture, 32),
            options={"num_warps": launch.warps, "num_stages": launch.stages, "launch_pdl": dependent},
        )
    [registers], [(stores, loads)] = (
        re.findall(pattern, log.getvalue())
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores, (\d+) bytes spill loads")
    )
    loops = [loop for loop in _INNER_LOOP.findall(made.asm["ttgir"]) if "dot " in loop]  # over tiles of keys
    return Compiled(
        int(registers),
        int(stores) + int(loads),
        made.metadata.shared,
        len(_MATRIX.findall(made.asm["ptx"])),
        buffers=min(map(int, _BUFFERS.findall(made.asm["ttgir"])), default=0),
        ahead=min((int(wait) for loop in loops for wait in _WAIT.findall(loop)), default=0),
        arrives=_ARRIVAL.search(made.asm["ptx"]) is not None,
        narrow_loads=made.asm["ptx"].count("ld.global.b16"),
        disorder=disorder(made.asm["ptx"], dependent=dependent, weights=weights),
        asked=prefetches(made.asm["ptx"]),
    )


def _launches(shape: Shape, architecture: int) -> Iterator[tuple[str, Launch]]:
    """Those of a shape that are compiled."""
    if shape.pages is not None:
        return over_pages(shape, architecture)
    if shape in ATTENTION_SHAPES:
        return attention(shape, architecture)
    every = architecture == DEPENDENT or shape in MORE_SHAPES + MORE_MIXTURES
    if shape.experts:
        return whatever_the_heads(shape) if every else products(shape)
    return (launches if every else basics)(shape, architecture)


def _jobs(shapes: list[Shape]) -> Iterator[tuple[Shape, int, set[str]]]:
    """Shapes, architectures, and the names of the kernels that no shape before has in the same way."""
    for architecture in SHARED_BYTES:
        seen = set()
        for shape in shapes:
            names = set()
            for name, launch in _launches(shape, architecture) if architecture in shape.architectures else ():
                key = str((launch.kernel.fn, *_specialized(launch), launch.warps, launch.stages))
                if key not in seen:
                    names.add(name)
                    seen.add(key)
            if names:
                yield shape, architecture, names


def lines(shape: Shape, architecture: int, names: set[str]) -> list[str]:
    """The lines of a shape in the table; those of kernels that are not as they should be begin with BAD."""
    found = []
    dependent: set[object] = set()  # kernels that were compiled for dependent launches
    for name, launch in _launches(shape, architecture):
        if name not in names:
            continue
        made = compiled(launch, architecture)
        fault = _fault(name, shape, architecture, launch, made)
        found.append(f"{_mark(fault)} {_line(name, shape, architecture, launch, made)} {fault}")
        if architecture == DEPENDENT and shape in DEPENDENT_SHAPES and launch.kernel not in dependent:
            dependent.add(launch.kernel)
            made, plain = compiled(launch, architecture, dependent=True), made
            fault = _fault(name, shape, architecture, launch, made)
            if not fault and "asked" in launch.constants and not made.asked:
                fault = "it does not ask for weights before it waits"
            if not fault and made.registers > plain.registers + _MORE_REGISTERS:
                fault = f"it takes {plain.registers} registers where it is launched plainly"
            line = _line(f"{name}, dependent", shape, architecture, launch, made)
            found.append(f"{_mark(fault)} {line} {fault}")
    return found


def _mark(fault: str) -> str:
    return "BAD" if fault else "   "


def _line(name: str, shape: Shape, architecture: int, launch: Launch, made: Compiled) -> str:
    """What is printed of a kernel."""
    line = (
        f"{architecture}  {_TYPES[shape.dtype]:5}  {_TYPES[shape.pages or shape.dtype]:7}"
        f"  {shape.heads:2}/{shape.kv_heads:<2}  {shape.head_dim:8}  {shape.window:6}  {name:27}"
        f"  {made.registers:9}  {made.spilled_bytes:7}  {made.shared_bytes:8}"
        f"  {made.matrix_instructions:13}  {_programs(architecture, launch, made):8}"
    )
    if made.buffers:
        line += f"  {made.buffers:7}  {made.ahead:5}"
    if name.startswith("few rows"):
        line += f"  {_bytes_ahead(architecture, launch, made) >> 10:8}"
    return line


def main(shapes: list[Shape]) -> int:
    """Print the table; the number of kernels that are not as they should be. Two processes compile."""
    print(
        "    sm  dtype  pages    heads  head_dim  window  kernel                       registers  spilled"
        "  shared B  matrix instr.  programs  buffers  ahead  KB ahead"
    )
    bad = 0
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        for found in processes.map(lines, *zip(*_jobs(shapes), strict=True)):
            print("\n".join(found), flush=True)
            bad += sum(line.startswith("BAD") for line in found)
    return bad


def _programs(architecture: int, launch: Launch, made: Compiled) -> int:
    """How many programs of this kernel a multiprocessor runs at once."""
    threads = 1536 if architecture in (86, 89) else 2048
    processor = Multiprocessor(SHARED_BYTES[architecture] + 1024, threads)
    return processor.programs(made.registers, made.shared_bytes, launch.warps)


def _blocks(launch: Launch) -> int:
    """How many programs it has in all."""
    return math.prod(launch.grid)


def _bytes_ahead(architecture: int, launch: Launch, made: Compiled) -> int:
    """Of weights: how many a multiprocessor may have on their way in a product of few rows.

    `ahead` counts tiles of weights and of rows; of 4 bits also those of scales and minima, apart for each
    span. There are no more programs than outputs ask for.
    """
    weight, constants = launch.arguments["weight"], launch.constants
    assert isinstance(weight, torch.Tensor)
    tile, ahead = constants["outputs"] * constants["inputs"] * weight.element_size(), made.ahead // 2
    if "span" in constants:
        tile, ahead = tile // 2, made.buffers - 1 if made.ahead else 0
    programs = min(_programs(architecture, launch, made), -(-_blocks(launch) // PROCESSORS[architecture]))
    return programs * ahead * tile


def _fault(name: str, shape: Shape, architecture: int, launch: Launch, made: Compiled) -> str:
    """What is wrong with a kernel; "" if nothing is."""
    # fp32 is there for comparisons: prompts of wide heads may keep a little in memory.
    if made.spilled_bytes > (_FP32_SPILLED if shape.dtype == torch.float32 and name.endswith("long") else 0):
        return "it spills registers"
    if made.disorder:
        return made.disorder
    if made.shared_bytes > SHARED_BYTES[architecture]:
        return "it does not fit into shared memory"
    parts = "arrivals" in launch.arguments and launch.constants.get("splits", 1) > 1
    if (name.startswith("attention") or parts) and not made.arrives:
        return "it may merge results that are not stored yet"
    if "rows, 4 bits" in name and not made.matrix_instructions:
        return "it has no matrix instructions"
    if name.startswith("few rows"):
        needed = MEMORY_BYTES_PER_S[architecture] / PROCESSORS[architecture] * LATENCY_S
        few = (
            _bytes_ahead(architecture, launch, made) < needed and _blocks(launch) >= PROCESSORS[architecture]
        )
        return "" if made.matrix_instructions and not few else "it loads too few weights ahead"
    # fp32, for tests, has no matrix instruction of its precision.
    if (
        name not in ("attention, short", "attention, long", "shrink", "expand")
        or shape.dtype == torch.float32
    ):
        return ""
    if not made.matrix_instructions:
        return "it has no matrix instructions"
    if not name.startswith("attention"):
        return "it reads factors two bytes at a time" if made.narrow_loads else ""
    is_long = name == "attention, long"
    buffers = BUFFERS[architecture][is_long]
    if launch.constants["ahead"]:
        buffers = min(buffers, _FEW_BUFFERS)
    if shape.pages is not None:
        buffers = min(buffers, _CONVERTED_BUFFERS)
    if made.buffers < buffers or not made.ahead:
        return "it loads too few tiles of keys ahead"
    if _programs(architecture, launch, made) < (1 if is_long else _SHORT_PROGRAMS):
        return "too few programs run at once"
    return ""


if __name__ == "__main__":
    chosen = SHAPES + MIXTURES + ATTENTION_SHAPES + PAGE_SHAPES
    if "--all" in sys.argv[1:]:
        chosen += MORE_SHAPES + MORE_MIXTURES + MORE_PAGE_SHAPES
    sys.exit(main(chosen) > 0)
