"""The executor's configuration: flags, then PACELINE_EXECUTOR_* variables, then --config YAML."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from paceline.service.identity import MAX_PRIORITY, Identity
from paceline.service.settings import ServiceSettings
from pydantic import ByteSize, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from executor_service.backends.ranks import Rank

BackendName = Literal["oracle", "paged-attention", "torch"]
Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class ExecutorConfig(ServiceSettings):
    """Paceline's executor: a model, its device and a paged KV cache, as a gRPC service."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_EXECUTOR_")

    SECRET_TOKENS: ClassVar[Mapping[str, Identity]] = {
        "auth_token": Identity("internal", "token", 1.0, MAX_PRIORITY, admin=True)
    }
    TOKEN_IS_ADMIN: ClassVar[bool] = True  # it is a scheduler's, not a client's

    port: int = Field(50061, ge=0, le=65535, description="port to listen on; 0: any free one")

    # the model
    backend: BackendName = Field("torch", description="what computes")
    model: Path | None = Field(None, description="a Hugging Face directory or a GGUF file (torch)")
    device: str = Field("auto", description="auto, cpu or cuda[:index] (torch)")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"] = Field(
        "auto",
        description="of weights; int8: on CPU twice as fast and nearly as good; fp8: of CUDA products' inputs"
        " too; neither is for experts on CUDA (torch)",
    )
    graphs: Literal["on", "off"] = Field(
        "on", description="replay captured steps on CUDA; off: launch each kernel, for debugging (torch)"
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of the model; 0: one per core (torch)")
    tensor_parallel: int = Field(
        1, ge=1, le=64, description="processes that share the model, each with a device of its own (torch)"
    )
    rank_timeout_s: float = Field(
        60.0, ge=1, le=3600, description="one of them that keeps the others waiting longer is lost (torch)"
    )

    # the cache and the step
    kv_memory: ByteSize | None = Field(
        None,
        description="bytes of KV pages, as in 2GiB; default: 1GiB on CPU, on CUDA what a largest step leaves",
    )
    pages: Positive | None = Field(None, description="KV pages, instead of kv-memory")
    page_size: int = Field(16, ge=1, le=1024, description="tokens per page")
    max_sequences: Positive = Field(1024, le=1 << 20, description="live caches, all sessions together")
    max_rows: Positive = Field(1024, le=1 << 16, description="rows of a step, openings included")
    max_step_tokens: Positive = Field(8192, le=1 << 24, description="tokens fed in one step")
    max_piece_tokens: Positive | None = Field(
        None, description="tokens fed in one forward: a longer step takes several; default: the backend's"
    )
    max_in_flight: int = Field(4, ge=1, le=64, description="unanswered steps of a stream, and replies kept")
    session0_fraction: float = Field(
        0.5, gt=0, le=1, description="share of pages and of max-sequences for callers without a session"
    )
    max_sessions_per_caller: Positive = Field(64, le=256, description="open sessions of one identity")
    lease_ms: int = Field(30_000, ge=500, le=3_600_000, description="of a session that names none")

    # the service
    stuck_after_s: float = Field(30.0, gt=0, le=3600, description="a step longer than this is NOT_SERVING")
    max_queued_steps: Positive = Field(1024, description="steps waiting, all clients together")

    # the oracle's and the reference's models, clock and faults
    vocab_size: Positive = Field(
        257, le=1 << 20, description="ids; 257: bytes and an end (oracle, paged-attention)"
    )
    context_length: Positive = Field(32_768, le=1 << 24, description="tokens (oracle, paged-attention)")
    draft_agreement: Fraction = Field(1.0, description="share of the target's logits; 1: the target (oracle)")
    draft_seed: int = Field(0, ge=0, lt=1 << 64, description="which logits agree (oracle)")
    step_ms: float = Field(0.0, ge=0, le=600_000, description="a step takes at least this (oracle)")
    token_us: float = Field(0.0, ge=0, le=60_000_000, description="and this for each token (oracle)")
    nan_on_token: int | None = Field(None, ge=0, description="fault: NaN logits behind this id (oracle)")
    exit_on_token: int | None = Field(None, ge=0, description="fault: die when this id is fed (oracle)")
    exit_after_steps: int | None = Field(None, ge=0, description="fault: die after so many (oracle)")
    freeze_after_steps: int | None = Field(None, ge=0, description="fault: stop after so many (oracle)")

    def open_doors(self) -> list[str]:
        """Those of the port, and where the ranks of a model meet."""
        doors = super().open_doors()
        launched = Rank.from_environment(os.environ)
        if launched is not None or self.tensor_parallel > 1:
            where = f"at {launched.host}" if launched is not None else "on this machine"
            doors.append(
                f"ranks of the model meet {where} in plaintext and without credentials: whoever reaches them "
                "there can read and change what they compute"
            )
        return doors

    @field_validator("model")
    @classmethod
    def _exists(cls, path: Path | None) -> Path | None:
        if path is not None and not path.exists():
            raise ValueError(f"no file {path}")
        return path

    @model_validator(mode="after")
    def _consistent(self) -> ExecutorConfig:
        if self.backend == "torch" and self.model is None:
            raise ValueError("the torch backend needs --model; --backend oracle needs none")
        if self.backend != "torch" and self.tensor_parallel > 1:
            raise ValueError("--tensor-parallel is for the torch backend")
        if self.max_step_tokens < self.max_rows:
            raise ValueError(
                f"--max-step-tokens {self.max_step_tokens} must be at least --max-rows {self.max_rows}: "
                "every sequence can decode in a step"
            )
        if self.kv_memory is not None and self.pages is not None:
            raise ValueError("--kv-memory or --pages, not both")
        return self
