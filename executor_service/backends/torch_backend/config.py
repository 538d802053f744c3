"""`TorchConfig`: which model the torch backend loads, where and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

BLOCKS = "blocks"
"""The value of `--dtype` for quantized weights as the file has them."""
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.float32,  # on CPU: dtype of all but weights, keys and values
    BLOCKS: torch.float32,  # on CPU: the same; on CUDA activations have bf16
    "fp8": torch.bfloat16,  # dtype of all but the linear layers
}
"""Values of `--dtype`, and the dtype that activations have with each."""
_VERSIONS = {BLOCKS: 1}
"""Of a dtype's arithmetic, where bits of results have changed since its first release, or may change."""
KV_DTYPES = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Values of `--kv-dtype`, and the dtype of keys and values; None: what the kernels have without it."""


@dataclass(frozen=True, slots=True)
class TorchConfig:
    """Which model, where and how."""

    model: Path  # a Hugging Face directory or a GGUF file
    device: str = "cpu"
    dtype: str = "float32"
    kv_dtype: str = "auto"
    threads: int = 0  # CPU threads; 0: one per core
    max_context: int | None = None  # tokens of the longest sequence; None: the model's
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # in place of the model's
    graphs: bool = True  # on CUDA, steps are captured and replayed
    programmatic_dependent_launch: bool | None = None  # None: if the device has it

    @property
    def arithmetic(self) -> str:
        """What results depend on beside model and pages; part of the fingerprint: caches never mix."""
        version = _VERSIONS.get(self.dtype)
        return self.dtype if version is None else f"{self.dtype}-{version}"

    @property
    def max_piece_tokens(self) -> int:
        """Maximum tokens of one forward: of prompts, decodes and drafts together.

        For most models that is at most a second's work, and enough to keep the device busy.
        """
        return 2048 if self.device.startswith("cuda") else 512

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype {self.kv_dtype!r} is none of {', '.join(KV_DTYPES)}")
        if self.threads < 0:
            raise ValueError(f"threads {self.threads} is negative")
        if self.max_context is not None and self.max_context < 1:
            raise ValueError(f"max_context {self.max_context} is not positive")
