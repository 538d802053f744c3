"""The executor's configuration: flags, then PACELINE_EXECUTOR_* variables, then --config YAML, first wins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ByteSize, Field, model_validator
from pydantic_settings import SettingsConfigDict
from service_kit.identity import MAX_PRIORITY, Identity
from service_kit.plugins import PluginError
from service_kit.settings import ServiceSettings

from executor_service.backends.oracle_backend.settings import OracleSettings, ScriptSettings
from executor_service.backends.settings import BackendSettings, PagedAttentionSettings, PluginSettings
from executor_service.backends.torch_backend.parallel.ranks import Rank
from executor_service.backends.torch_backend.settings import TorchSettings
from executor_service.contract.limits import MAX_ADAPTER_RANK

Positive = Annotated[int, Field(ge=1)]


BACKENDS: Mapping[str, type[BackendSettings]] = {
    "oracle": OracleSettings,
    "script": ScriptSettings,
    "paged-attention": PagedAttentionSettings,
    "torch": TorchSettings,
}


class ExecutorConfig(TorchSettings, ScriptSettings, PagedAttentionSettings, PluginSettings, ServiceSettings):
    """Paceline's executor: a model, its device and a paged KV cache, as a gRPC service."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_EXECUTOR_")

    SECRET_TOKENS: ClassVar[Mapping[str, Identity]] = {
        "auth_token": Identity("internal", "token", 1.0, MAX_PRIORITY, admin=True)
    }
    TOKEN_IS_ADMIN: ClassVar[bool] = True  # schedulers have it, clients do not

    port: int = Field(50061, ge=0, le=65535, description="port to listen on; 0: any free one")

    backend: str = Field(
        "torch",
        description="what computes the steps: oracle, script, paged-attention, torch, or an installed plugin",
    )

    # the cache and the step
    kv_memory: ByteSize | None = Field(
        None,
        description="memory of the KV pages, as in 2GiB; default: 1GiB on CPU,"
        " on CUDA the free memory less that of the largest step",
    )
    pages: Positive | None = Field(None, description="KV pages, instead of kv-memory")
    page_size: int = Field(16, ge=1, le=1024, description="tokens per page")
    max_sequences: Positive = Field(1024, le=1 << 20, description="caches of all sessions together")
    max_rows: Positive = Field(1024, le=1 << 16, description="rows in a step, openings included")
    max_step_tokens: Positive = Field(8192, le=1 << 24, description="tokens computed in a step")
    max_piece_tokens: Positive | None = Field(
        None, description="tokens computed in one forward, longer steps take several; default: the backend's"
    )
    max_in_flight: int = Field(
        4, ge=1, le=64, description="unanswered steps of a stream, and replies kept for replays"
    )
    session0_fraction: float = Field(
        0.5,
        gt=0,
        le=1,
        description="share of pages and of max-sequences that callers without a session may use",
    )
    max_sessions_per_caller: Positive = Field(64, le=256, description="open sessions of one identity")
    lease_ms: int = Field(
        30_000, ge=500, le=3_600_000, description="lease of a session that asks for none, milliseconds"
    )

    # adapters
    adapter_dir: Path | None = Field(
        None, description="offer adapters: LoadAdapter loads PEFT directories below this one, and no others"
    )
    max_adapters: Positive = Field(64, le=4096, description="loaded adapters")
    adapter_slots: Positive = Field(8, le=1024, description="adapters that live caches use at once")
    max_adapter_rank: Positive = Field(
        MAX_ADAPTER_RANK, le=MAX_ADAPTER_RANK, description="rank of an adapter"
    )
    adapter_memory: ByteSize = Field(
        ByteSize(4 << 30), ge=1, description="memory of the weights of loaded adapters, as in 4GiB"
    )

    # the service
    stuck_after_s: float = Field(
        30.0, gt=0, le=3600, description="health turns NOT_SERVING while a step takes longer, seconds"
    )
    max_queued_steps: Positive = Field(1024, description="queued steps of all clients together")

    def security_warnings(self) -> list[str]:
        """Warnings about access without credentials: to the ports, and to the ranks' rendezvous."""
        warnings = super().security_warnings()
        launched = Rank.from_environment(os.environ)
        if launched is not None or self.tensor_parallel > 1:
            where = f"at {launched.host}" if launched is not None else "on this machine"
            warnings.append(
                f"ranks of the model meet {where} in plaintext and without credentials: any process that can "
                "connect can read and change what they compute"
            )
        return warnings

    @property
    def backend_settings(self) -> BackendSettings:
        """The settings of the chosen backend."""
        return self._backend_type.of(self)

    @property
    def _backend_type(self) -> type[BackendSettings]:
        return BACKENDS.get(self.backend, PluginSettings)

    @property
    def follower_flags(self) -> list[str]:
        """Command line of a follower rank: the backend's settings and the log's."""
        flags = []
        for name in ("backend", *self._backend_type.model_fields, "log_level", "log_format"):
            if (value := getattr(self, name)) is not None:
                for one in value if isinstance(value, tuple) else (value,):
                    flags += [f"--{name.replace('_', '-')}", str(one)]
        return [*flags, "--exit-with-stdin", "--no-secrets-stdin"]

    @model_validator(mode="after")
    def _consistent(self) -> ExecutorConfig:
        try:
            self.backend_settings.check()
        except PluginError as error:
            raise ValueError(f"--backend: {error}; Paceline's own are {', '.join(BACKENDS)}") from error
        if self.backend_options and self.backend in BACKENDS:
            raise ValueError(f"--backend-options are for plugins, and {self.backend} is none")
        if self.backend != "torch" and self.tensor_parallel > 1:
            raise ValueError("--tensor-parallel is for the torch backend")
        if self.adapter_dir is not None and not self.adapter_dir.is_dir():
            raise ValueError(f"--adapter-dir: no directory {self.adapter_dir}")
        if self.max_step_tokens < self.max_rows:
            raise ValueError(
                f"--max-step-tokens {self.max_step_tokens} must be at least --max-rows {self.max_rows}: "
                "in a step, each row computes at least one token"
            )
        if self.kv_memory is not None and self.pages is not None:
            raise ValueError("--kv-memory or --pages, not both")
        return self
