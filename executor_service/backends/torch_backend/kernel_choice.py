"""From a device, a dtype and a format of pages to the `Kernels` that compute there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from executor_service.backends.base import ModelError, Progress
from executor_service.backends.torch_backend.config import BLOCKS, DTYPES, KV_DTYPES
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from executor_service.backends.torch_backend.ops.kernels import Kernels, PlainKernels
from executor_service.backends.torch_backend.ops.quantized import (
    Format,
    Fp8,
    Int8,
    check_capability,
    check_fp8,
)

FORMATS: dict[str, Format] = {"int8": Int8(), "fp8": Fp8()}

_MIN_DEPENDENT_LAUNCH_CAPABILITY = (9, 0)


def compilation(device_name: str, dtype_name: str, progress: Progress) -> AbstractContextManager[None]:
    """A context manager: `progress` hears of the kernels for the CPU that are compiled inside."""
    if torch.device(device_name).type != "cpu" or DTYPES[dtype_name] != torch.float32:
        return nullcontext()
    from executor_service.backends.torch_backend.cpu.threads.compilation import compilation_told

    return compilation_told(progress)


def make_kernels(device_name: str, dtype_name: str, kv_dtype_name: str, threads: int) -> Kernels:
    """The kernels for a torch device ("cuda:1"), one of DTYPES, one of KV_DTYPES and a number of CPU threads.

    Sets the current CUDA device and torch's number of threads. Raises ModelError for a device that cannot be
    used, or on which one of the dtypes cannot be computed.
    """
    dtype, form, cache_dtype = DTYPES[dtype_name], FORMATS.get(dtype_name), KV_DTYPES[kv_dtype_name]
    try:
        device = torch.device(device_name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device_name!r} can't be used: {error}") from None
    if device.type == "cpu" and dtype == torch.float32:
        # Imported only here: CUDA needs no compiler for the host.
        from executor_service.backends.torch_backend.cpu.kernels import (
            CpuBlockKernels,
            CpuInt8Kernels,
            CpuKernels,
        )

        if cache_dtype == torch.float8_e4m3fn:
            raise ModelError(f"kv-dtype fp8 is not for dtype {dtype_name} on cpu; int8 is")
        torch.set_num_threads(1)  # large operations use the kernels' thread pool
        kinds = {"int8": CpuInt8Kernels, BLOCKS: CpuBlockKernels}
        return kinds.get(dtype_name, CpuKernels)(threads, cache_dtype)
    if dtype_name == BLOCKS and device.type != "cuda":
        raise ModelError(f"dtype {BLOCKS} is for cpu and cuda; the device is {device_name!r}")
    if form is not None:
        form.check(device)
    if form is not None or dtype_name == BLOCKS:
        dtype = torch.bfloat16
    torch.set_num_threads(threads)
    if device.type == "cuda":
        # Imported only here: Triton comes with torch's CUDA builds alone.
        from executor_service.backends.torch_backend.cuda.kernels import CudaBlockKernels, CudaKernels
        from executor_service.backends.torch_backend.cuda.launch.toolchain import check_toolchain

        if device.index is not None:
            torch.cuda.set_device(device)  # of this thread: Triton launches on the current device
        check_toolchain()
        # Sums of split products are in fp32: by default cuBLAS may add up their parts in 16 bits.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        if cache_dtype == torch.float8_e4m3fn:
            check_fp8("kv-dtype fp8", device)
        if dtype_name == BLOCKS:
            return CudaBlockKernels(device, dtype, None, cache_dtype)
        return CudaKernels(device, dtype, form, cache_dtype)
    return PlainKernels(device, dtype, form, cache_dtype)


def dependent_launch(device: torch.device, *, wanted: bool | None) -> bool:
    """Whether a step's kernels are launched dependently; `wanted`: None: if the device has such launches.

    Raises ModelError if it has not got what is wanted.
    """
    if wanted is None:
        there = device.type == "cuda"
        return there and torch.cuda.get_device_capability(device) >= _MIN_DEPENDENT_LAUNCH_CAPABILITY
    if wanted:
        what = "programmatic-dependent-launch on"
        if device.type != "cuda":
            raise ModelError(f"{what} is for CUDA; the device is {str(device)!r}")
        check_capability(what, device, _MIN_DEPENDENT_LAUNCH_CAPABILITY)
    return wanted


def check_spec(spec: ModelSpec, kernels: Kernels, dtype_name: str) -> None:
    """Raises ModelError for models that these kernels do not compute."""
    quantized = isinstance(kernels, PlainKernels) and (kernels.form is not None or dtype_name == BLOCKS)
    if spec.moe and quantized:
        # There is no grouped product of such weights, and most of such a model is experts.
        raise ModelError(f"dtype {dtype_name} is not for mixtures of experts on this device")
