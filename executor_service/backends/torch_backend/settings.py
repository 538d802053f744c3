"""`TorchSettings`: which model the torch backend loads, where and how. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from service_kit.settings import StringList

from executor_service.backends.settings import BackendSettings
from executor_service.backends.torch_backend.files.generation import sampling_value


class TorchSettings(BackendSettings):
    """Which model, on which devices. All ranks of a group have the same settings."""

    model: Path | None = Field(default=None, description="a Hugging Face directory or a GGUF file (torch)")
    device: str = Field(default="auto", description="auto, cpu or cuda[:index] (torch)")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "blocks", "fp8"] = Field(
        default="auto",
        description="dtype of weights; auto: bfloat16 on CUDA, on CPU blocks for GGUF files, else float32;"
        " blocks: quantized weights as the file has them, on CUDA those of 4 bits; int8: on CPU about twice"
        " as fast as float32, at a small loss of quality; fp8: on CUDA, of activations too; int8, fp8 and"
        " blocks don't support mixtures of experts on CUDA (torch)",
    )
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(
        default="auto",
        description="keys and values in pages; auto: fp32 on CPU, fp16 with int8 and blocks, on CUDA the"
        " dtype of activations; int8: about half of 16 bits, with a scale for each token and head; fp8: the"
        " same on CUDA, from compute capability 8.9 (torch)",
    )
    graphs: Literal["on", "off"] = Field(
        default="on",
        description="replay captured steps on CUDA; off: launch each kernel, for debugging (torch)",
    )
    programmatic_dependent_launch: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="start each kernel of a step while the one before it ends; auto: on CUDA, from compute"
        " capability 9.0 (torch)",
    )
    threads: int = Field(
        default=0, ge=0, le=1024, description="CPU threads of the model; 0: one per core (torch)"
    )
    max_context: int | None = Field(
        default=None,
        ge=1,
        le=1 << 24,
        description="tokens of the longest sequence, at most and by default the model's; models with longrope"
        " or dynamic NTK rotate for this length (torch)",
    )
    sampling_default: StringList = Field(
        default=(),
        description="NAME=VALUE: what requests get that do not set this sampling parameter, in place of the"
        " model's own: temperature, top_p, top_k, min_p or repetition_penalty; repeat it (torch)",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="processes that share the model, each with a device of its own (torch)",
    )
    rank_timeout_s: float = Field(
        default=60.0,
        ge=1,
        le=3600,
        description="seconds after which a rank that does not answer the others counts as lost (torch)",
    )

    @field_validator("model")
    @classmethod
    def _exists(cls, path: Path | None) -> Path | None:
        if path is not None and not path.exists():
            raise ValueError(f"no file {path}")
        return path

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """Values of `sampling_default` by name. Raises ValueError for what a request may not have."""
        values = {}
        for given in self.sampling_default:
            name, _, value = given.partition("=")
            try:
                values[name] = sampling_value(name, float(value))
            except ValueError as error:
                raise ValueError(f"--sampling-default {given}: {error}") from None
        return values

    def check(self) -> None:
        """Raises ValueError if no model is set, or a sampling default is none."""
        _ = self.sampling_defaults
        if self.model is None:
            raise ValueError("the torch backend needs --model; --backend oracle needs none")
