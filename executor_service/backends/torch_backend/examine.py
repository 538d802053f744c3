"""`python -m executor_service.backends.torch_backend.examine MODEL`: a model's needs, or why it is refused.

Prints a JSON object. Only configurations and the headers of the weights' files are read: a model of any size
takes a second and no memory. What only the weights can tell, such as NaN, is found when the model is loaded.
"""

from __future__ import annotations

import json
import math
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import BLOCKS, DTYPES, TorchConfig
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from executor_service.backends.torch_backend.files.gguf_checkpoint import GgufCheckpoint
from executor_service.backends.torch_backend.files.tensor_shapes import expected_shapes
from executor_service.backends.torch_backend.files.weights import Checkpoint, open_checkpoint
from executor_service.backends.torch_backend.kernel_choice import FORMATS, check_spec
from executor_service.backends.torch_backend.ops.kernels import PlainKernels
from executor_service.backends.torch_backend.ops.page_format import token_bytes


def examined(model: Path) -> dict[str, Any]:
    """What `paceline models check` shows of a directory or a GGUF file; `problem` is "" if it can be loaded.

    `tokenizer` has the files that a scheduler gets, or `tokenizer_problem` says why there are none.
    """
    found: dict[str, Any] = {"problem": "", "tokenizer": None, "tokenizer_problem": ""}
    try:
        with closing(open_checkpoint(model)) as checkpoint:
            found |= _facts(checkpoint)
    except ModelError as error:
        found["problem"] = str(error)
    try:
        files = TorchBackend(TorchConfig(model)).tokenizer()
    except (ModelError, OSError) as error:
        return found | {"tokenizer_problem": str(error)}
    return found | {
        "tokenizer": {
            "tokenizer_json": files.tokenizer_json.decode(),
            "chat_template": files.chat_template,
            "bos_token": files.bos_token,
            "eos_token": files.eos_token,
            "add_bos": files.add_bos,
        }
    }


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    spec = checkpoint.spec
    parameters = sum(math.prod(shape) for _, shape in expected_shapes(spec))
    stored = sum(file.stat().st_size for file in checkpoint.files())
    sizes = {name: parameters * _weight_bytes(name) for name in DTYPES if name != BLOCKS}
    if isinstance(checkpoint, GgufCheckpoint):
        sizes[BLOCKS] = stored
    return {
        "name": checkpoint.name,
        "architecture": spec.architecture,
        "quantization": checkpoint.quantization or "",
        "layers": spec.layers,
        "context_length": spec.context_length,
        "parameters": parameters,
        "stored_bytes": stored,
        "weight_bytes": sizes,
        "kv_bytes_per_token": spec.layers * token_bytes(spec.kv_heads, spec.head_dim, torch.float32),
        "dtypes": {device: _accepted(spec, on_cuda=device == "cuda") for device in ("cpu", "cuda")},
    }


def _weight_bytes(dtype: str) -> int:
    """Bytes of a weight; of 8-bit formats without their scales, and as if nothing were left in 16 bits."""
    return 1 if dtype in FORMATS else DTYPES[dtype].itemsize


def _accepted(spec: ModelSpec, *, on_cuda: bool) -> list[str]:
    """The dtypes for which the model is not refused on this kind of device.

    `CudaKernels` are `PlainKernels` with other attention, those of the CPU for what is computed in 16 bits.
    """
    accepted = []
    for name, dtype in DTYPES.items():
        if on_cuda or dtype != torch.float32:
            try:
                check_spec(spec, PlainKernels(torch.device("cpu"), dtype, FORMATS.get(name)), name)
            except ModelError:
                continue
        accepted.append(name)
    return accepted


if __name__ == "__main__":
    print(json.dumps(examined(Path(sys.argv[1]))))
