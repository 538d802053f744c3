"""The scheduler's settings: flags, then PACELINE_SCHEDULER_*, then the YAML file of --config."""

from __future__ import annotations

from pathlib import Path

from paceline.channel import Security
from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from scheduler_service.core.config import CoreConfig
from scheduler_service.link.executor import Timing
from scheduler_service.logs import LogFormat, LogLevel
from scheduler_service.model import RequestLimits
from scheduler_service.security import ServerSecurity
from scheduler_service.settings import ServiceSettings, StringList


class SchedulerSettings(ServiceSettings):
    """Paceline's scheduler: takes requests, decides what executors compute, streams tokens."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_SCHEDULER_")

    # Where
    executor: StringList = Field(
        default=("127.0.0.1:50061",),
        min_length=1,
        description="address of an executor; repeat it for failover",
    )
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=50051, ge=0, le=65535, description="port to listen on; 0: any free one")
    port_file: Path | None = Field(default=None, description="write the port here when serving")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Prometheus on this port; 0: any free one"
    )
    metrics_host: str = Field(default="127.0.0.1", description="address of the metrics port")

    # How much at once
    max_step_tokens: int = Field(default=512, ge=1, le=1 << 20, description="tokens fed in one step")
    prefill_chunk_tokens: int = Field(default=256, ge=1, le=1 << 20, description="of one prompt in one step")
    max_running: int = Field(default=256, ge=1, le=1 << 16, description="sequences that hold a cache")
    max_queued_requests: int = Field(default=1024, ge=1, le=1 << 20, description="requests that wait")
    max_queued_tokens: int = Field(default=1 << 20, ge=1, le=1 << 30, description="their prompt tokens")

    # What one request may ask for
    max_n: int = Field(default=16, ge=1, le=1024, description="completions of a request")
    max_stop_strings: int = Field(default=16, ge=0, le=1024, description="stop strings of a request")
    max_stop_string_bytes: int = Field(default=256, ge=1, le=4096, description="of one of them")
    max_stop_token_ids: int = Field(default=64, ge=0, le=1024, description="stop tokens of a request")
    max_logit_bias: int = Field(default=1024, ge=0, le=1 << 16, description="logit bias entries")
    max_logprobs: int = Field(default=20, ge=0, le=128, description="most likely tokens shown")
    max_prompt_bytes: int = Field(default=1 << 20, ge=1, le=3 << 20, description="of text or messages")

    # How long
    failover_timeout_s: float = Field(
        default=60.0, ge=0, le=86400, description="a request waits so long for an executor"
    )
    stall_timeout_s: float = Field(
        default=30.0, gt=0, le=86400, description="a client may leave its stream unread so long"
    )
    drain_timeout_s: float = Field(
        default=30.0, ge=0, le=86400, description="after SIGTERM, running requests may go on so long"
    )
    heartbeat_interval_s: float = Field(default=1.0, gt=0, le=60, description="between looks at an executor")
    heartbeat_timeout_s: float = Field(
        default=10.0, gt=0, le=600, description="an executor that does not answer them is lost"
    )
    step_timeout_s: float = Field(
        default=120.0, gt=0, le=86400, description="a step without progress so long means a lost executor"
    )

    # Who may come in
    insecure: bool = Field(default=False, description="allow plaintext beyond loopback")
    tls_cert: Path | None = Field(default=None, description="PEM certificate chain")
    tls_key: Path | None = Field(default=None, description="PEM private key")
    tls_client_ca: Path | None = Field(default=None, description="PEM; demand client certificates (mTLS)")
    auth_token: str = Field(default="", repr=False, description="clients must send it (better: a file)")
    auth_token_file: Path | None = Field(default=None, description="clients must send this file's token")
    executor_tls_ca: Path | None = Field(default=None, description="PEM; executors' authority")
    executor_tls_cert: Path | None = Field(default=None, description="PEM; our certificate for executors")
    executor_tls_key: Path | None = Field(default=None, description="PEM; its key")
    executor_token_file: Path | None = Field(default=None, description="the executors' token")

    # What it tells
    reflection: bool = Field(default=False, description="serve gRPC reflection")
    log_level: LogLevel = Field(default="info", description="least severity")
    log_format: LogFormat = Field(default="auto", description="auto: console on a terminal, else json")

    @model_validator(mode="after")
    def _consistent(self) -> SchedulerSettings:
        _ = self.server_security, self.executor_security  # they check themselves, and read token files
        if len(set(self.executor)) != len(self.executor):
            raise ValueError("an executor is named twice")
        return self

    @property
    def core(self) -> CoreConfig:
        """The core's part."""
        return CoreConfig(
            max_step_tokens=self.max_step_tokens,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            max_running=self.max_running,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            failover_timeout_s=self.failover_timeout_s,
        )

    @property
    def request_limits(self) -> RequestLimits:
        """The codec's part."""
        return RequestLimits(
            max_n=self.max_n,
            max_stop_strings=self.max_stop_strings,
            max_stop_string_bytes=self.max_stop_string_bytes,
            max_stop_token_ids=self.max_stop_token_ids,
            max_logit_bias=self.max_logit_bias,
            max_logprobs=self.max_logprobs,
            max_prompt_bytes=self.max_prompt_bytes,
        )

    @property
    def timing(self) -> Timing:
        """The links' part."""
        return Timing(
            heartbeat_interval_s=self.heartbeat_interval_s,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            step_timeout_s=self.step_timeout_s,
        )

    @property
    def server_security(self) -> ServerSecurity:
        """Towards clients."""
        token = self.auth_token or _token(self.auth_token_file)
        return ServerSecurity(self.tls_cert, self.tls_key, self.tls_client_ca, token)

    @property
    def executor_security(self) -> Security:
        """Towards executors."""
        token = _token(self.executor_token_file)
        return Security(self.executor_tls_ca, self.executor_tls_cert, self.executor_tls_key, token)


def _token(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    if not token:
        raise ValueError(f"{path}: the token is empty")
    return token
