"""What a model takes of memory, known from its files' headers, and what a device leaves for KV pages."""

from __future__ import annotations

import math
from contextlib import closing

import torch

from executor_service.backends.torch_backend.config import BLOCKS, DTYPES, KV_DTYPES, TorchConfig
from executor_service.backends.torch_backend.files.gguf_blocks import FORMATS
from executor_service.backends.torch_backend.files.gguf_checkpoint import GgufCheckpoint
from executor_service.backends.torch_backend.files.tensor_shapes import expected_shapes
from executor_service.backends.torch_backend.files.weights import Checkpoint, open_checkpoint
from executor_service.backends.torch_backend.ops.page_format import token_bytes
from executor_service.backends.torch_backend.ops.row_tensors import LOGITS_ROWS

_BASE_BYTES = 384 << 20
"""Resident in a process that serves: libraries, compiled kernels, Python."""
_ID_BYTES = 1 << 10  # of the vocabulary, in the tokenizer and in the compiler of grammars
_INT8_BYTES = 1.05  # of a weight, scales included
_COPIES, _COPIES_OF_BLOCKS = 5, 2  # of the largest tensor, as of fp32, while it is read, checked and packed
KV_BYTES = 1 << 30  # by default, where the device has no memory of its own
_SPARE_SHARE, _MIN_SPARE_BYTES = 0.05, 2 << 30  # of device memory, left to CUDA graphs and libraries


def planned_bytes(config: TorchConfig, kv_bytes: int | None, pages: int | None, page_size: int) -> int:
    """The most host memory of one process, while it loads and when it serves with all pages in use.

    Without adapters. On a device with memory of its own, weights and pages are there. Raises ModelError.
    """
    with closing(open_checkpoint(config.model, blocks=config.dtype == BLOCKS)) as checkpoint:
        spec = checkpoint.spec
        sizes = [math.prod(shape) for _, shape in expected_shapes(spec)]
        files = sum(path.stat().st_size for path in checkpoint.files())
        weights = _weight_bytes(checkpoint, config.dtype, sum(sizes), files)
        copies = _COPIES_OF_BLOCKS if config.dtype == BLOCKS and checkpoint.quantization else _COPIES
    base = _BASE_BYTES + _ID_BYTES * spec.vocab_size
    loading = files + 4 * copies * max(sizes)
    if not config.device.startswith("cpu"):
        return base + loading
    if pages is not None:
        of_layer = token_bytes(spec.kv_heads, spec.head_dim, _page_dtype(config))
        kv_bytes = (pages + 1) * page_size * spec.layers * of_layer
    width = 4 * spec.hidden_size + 3 * spec.intermediate_size
    step = 4 * (config.max_piece_tokens * width + 2 * LOGITS_ROWS * spec.vocab_size)
    return base + weights + max((KV_BYTES if kv_bytes is None else kv_bytes) + step, loading)


def free_kv_bytes(device: torch.device, used: int) -> int:
    """Bytes of a CUDA device for KV pages by default: all that is free but a spare part and `used`."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return free - used - max(int(_SPARE_SHARE * total), _MIN_SPARE_BYTES)


def _weight_bytes(checkpoint: Checkpoint, dtype: str, parameters: int, files: int) -> int:
    if dtype == "int8":
        return int(_INT8_BYTES * parameters)
    if dtype != BLOCKS:
        return DTYPES[dtype].itemsize * parameters
    if isinstance(checkpoint, GgufCheckpoint):
        tensors = checkpoint.file.tensors.values()
        return sum(one.size if one.kind in FORMATS else 4 * math.prod(one.shape) for one in tensors)
    if checkpoint.quantization is None:  # then nothing stays quantized
        return 4 * parameters
    spec = checkpoint.spec  # what is not in the quantized layers has two bytes in the files, four in memory
    return files + 2 * (1 if spec.tied_embeddings else 2) * spec.vocab_size * spec.hidden_size


def _page_dtype(config: TorchConfig) -> torch.dtype:
    narrow = torch.float16 if config.dtype in ("int8", BLOCKS) else DTYPES[config.dtype]
    return KV_DTYPES[config.kv_dtype] or narrow
