"""The executor's configuration: flags, then PACELINE_EXECUTOR_* variables, then --config YAML."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from paceline.service.identity import MAX_PRIORITY, Identity
from paceline.service.settings import ServiceSettings
from pydantic import ByteSize, Field, model_validator
from pydantic_settings import SettingsConfigDict

from executor_service.backends.oracle_settings import OracleSettings
from executor_service.backends.paged_attention_settings import PagedAttentionSettings
from executor_service.backends.ranks import Rank
from executor_service.backends.settings import BackendSettings
from executor_service.backends.torch_settings import TorchSettings

BackendName = Literal["oracle", "paged-attention", "torch"]
Positive = Annotated[int, Field(ge=1)]


BACKENDS: Mapping[BackendName, type[BackendSettings]] = {
    "oracle": OracleSettings,
    "paged-attention": PagedAttentionSettings,
    "torch": TorchSettings,
}


class ExecutorConfig(TorchSettings, OracleSettings, PagedAttentionSettings, ServiceSettings):
    """Paceline's executor: a model, its device and a paged KV cache, as a gRPC service."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_EXECUTOR_")

    SECRET_TOKENS: ClassVar[Mapping[str, Identity]] = {
        "auth_token": Identity("internal", "token", 1.0, MAX_PRIORITY, admin=True)
    }
    TOKEN_IS_ADMIN: ClassVar[bool] = True  # it is a scheduler's, not a client's

    port: int = Field(50061, ge=0, le=65535, description="port to listen on; 0: any free one")

    backend: BackendName = Field("torch", description="what computes")

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

    @property
    def backend_settings(self) -> BackendSettings:
        """Those of the backend that was chosen."""
        return BACKENDS[self.backend].of(self)

    @property
    def follower_flags(self) -> list[str]:
        """Flags of a process that holds a part of this one's model: the backend's settings, and the log's."""
        flags = []
        for name in ("backend", *BACKENDS[self.backend].model_fields, "log_level", "log_format"):
            if (value := getattr(self, name)) is not None:
                flags += [f"--{name.replace('_', '-')}", str(value)]
        return [*flags, "--exit-with-stdin", "--no-secrets-stdin"]

    @model_validator(mode="after")
    def _consistent(self) -> ExecutorConfig:
        self.backend_settings.check()
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
