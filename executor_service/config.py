"""The executor's configuration: flags, then PACELINE_EXECUTOR_* variables, then --config YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from paceline.channel import is_loopback
from pydantic import ByteSize, Field, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

BackendName = Literal["oracle", "paged-attention", "torch"]
Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class ExecutorConfig(BaseSettings):
    """Paceline's executor: a model, its device and a paged KV cache, as a gRPC service."""

    model_config = SettingsConfigDict(
        env_prefix="PACELINE_EXECUTOR_",
        frozen=True,
        extra="forbid",
        cli_prog_name="python -m executor_service",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        protected_namespaces=(),
    )

    config: Path | None = Field(None, description="a YAML file with any of these settings")

    # the model
    backend: BackendName = Field("torch", description="what computes")
    model: Path | None = Field(None, description="a Hugging Face directory or a GGUF file (torch)")
    device: str = Field("auto", description="auto, cpu or cuda[:index] (torch)")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="of weights (torch)")
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of the model; 0: one per core (torch)")

    # the cache and the step
    kv_memory: ByteSize | None = Field(
        None, description="bytes of KV pages, as in 2GiB; default: 1GiB on CPU, 60 % of what is free on CUDA"
    )
    pages: Positive | None = Field(None, description="KV pages, instead of kv-memory")
    page_size: int = Field(16, ge=1, le=1024, description="tokens per page")
    max_sequences: Positive = Field(1024, le=1 << 20, description="live caches, all sessions together")
    max_rows: Positive = Field(1024, le=1 << 16, description="rows of a step, openings included")
    max_step_tokens: Positive = Field(8192, le=1 << 24, description="tokens fed in one step")
    max_in_flight: int = Field(4, ge=1, le=64, description="unanswered steps of a stream, and replies kept")
    lease_ms: int = Field(30_000, ge=500, le=3_600_000, description="of a session that names none")

    # the service
    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(50061, ge=0, le=65535, description="0: any free one")
    port_file: Path | None = Field(None, description="write the bound port here once bound")
    metrics_port: int | None = Field(None, ge=0, le=65535, description="Prometheus on this port; 0: any")
    metrics_host: str = Field("127.0.0.1", description="address of the metrics port")
    reflection: bool = Field(False, description="offer gRPC reflection")
    drain_timeout_s: float = Field(30.0, ge=0, le=3600, description="SIGTERM waits so long for live caches")
    stuck_after_s: float = Field(30.0, gt=0, le=3600, description="a step longer than this is NOT_SERVING")
    max_queued_steps: Positive = Field(1024, description="steps waiting, all clients together")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity")
    log_format: Literal["auto", "json", "console"] = Field("auto", description="auto: console on a terminal")

    # security
    insecure: bool = Field(False, description="serve plaintext beyond loopback")
    tls_cert: Path | None = Field(None, description="PEM certificate chain")
    tls_key: Path | None = Field(None, description="PEM private key")
    tls_client_ca: Path | None = Field(None, description="PEM authority of client certificates (mutual TLS)")
    auth_token_file: Path | None = Field(None, description="clients must send this file's token as Bearer")

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

    @property
    def address(self) -> str:
        """What to bind: host:port."""
        host = f"[{self.host}]" if ":" in self.host and not self.host.startswith("[") else self.host
        return f"{host}:{self.port}"

    @field_validator("config", "model", "tls_cert", "tls_key", "tls_client_ca", "auth_token_file")
    @classmethod
    def _exists(cls, path: Path | None) -> Path | None:
        if path is not None and not path.exists():
            raise ValueError(f"no file {path}")
        return path

    @model_validator(mode="after")
    def _consistent(self) -> ExecutorConfig:
        if self.backend == "torch" and self.model is None:
            raise ValueError("the torch backend needs --model; --backend oracle needs none")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca needs --tls-cert")
        if self.kv_memory is not None and self.pages is not None:
            raise ValueError("--kv-memory or --pages, not both")
        if self.tls_cert is None and not self.insecure and not is_loopback(self.address):
            raise ValueError(
                f"{self.host} is not loopback: give --tls-cert and --tls-key, or --insecure for plaintext"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The order: what is given in code (and by flags), environment, YAML."""
        given = {**env_settings(), **init_settings()}
        path = given.get("config")
        yaml = (YamlConfigSettingsSource(settings_cls, yaml_file=path),) if path else ()
        return (init_settings, env_settings, *yaml)


def parse(arguments: list[str]) -> ExecutorConfig:
    """The configuration of a command line. Raises pydantic.ValidationError; --help exits."""
    flags: CliSettingsSource[Any] = CliSettingsSource(ExecutorConfig, cli_parse_args=arguments)
    return ExecutorConfig(**flags())


def explain(errors: list[Any]) -> str:
    """Validation errors, one line each, in the words of the command line."""
    lines = []
    for error in errors:
        name = "-".join(str(part) for part in error["loc"]).replace("_", "-")
        message = str(error["msg"]).removeprefix("Value error, ")
        lines.append(f"--{name}: {message}" if name else message)
    return "\n".join(lines)
