"""What Triton's compiler makes of a launch for an architecture, without a GPU."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from tests.triton.disorder import disorder, prefetches

TYPES = {
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


def specialized(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
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
            signature[name] = "*" + TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            if known and (isinstance(value, torch.Tensor) or value % 16 == 0):
                hints[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, hints


def compiled(launch: Launch, architecture: int, *, dependent: bool = False) -> Compiled:
    """What Triton's just-in-time compiler would make of the launch."""
    signature, constants, hints = specialized(launch)
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
            options={
                "num_warps": launch.warps, "num_stages": launch.stages, "launch_pdl": dependent,
                "maxnreg": launch.registers or None,
            },
        )  # fmt: skip
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
