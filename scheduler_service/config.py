"""The scheduler's settings: from flags, else variables PACELINE_SCHEDULER_*, else the file of --config."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from paceline.channel import Security, is_loopback
from paceline.names import check_address
from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import SettingsConfigDict
from service_kit.identity import MAX_PRIORITY, Identity
from service_kit.security import check_tls_files
from service_kit.settings import ADMIN_TOKEN, StringList

from scheduler_service.chat_formats import ToolFormatSetting
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.request import DraftingWish, DraftSource
from scheduler_service.directory.settings import DirectorySettings
from scheduler_service.link.executor import Timing
from scheduler_service.model import (
    ADAPTER_NAME_RULE,
    ALWAYS_DRAFTERS,
    DraftingOffer,
    RequestAllowance,
    is_adapter_name,
)
from scheduler_service.text.job import TextLimits


def _speculation_text(value: object) -> object:
    """Undo YAML's conversions: `off` is read as False, and a number as an int."""
    if value is False:
        return "off"
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


SpeculationSetting = Annotated[
    str, BeforeValidator(_speculation_text), Field(pattern=r"^(off|auto|[1-9]\d{0,3})$")
]
"""off, auto, or a number of drafts."""


MAX_INSTANCE = 96
"""Characters of a scheduler's name. Session owners have up to 128 bytes, and add a link's number to it."""


class SchedulerSettings(DirectorySettings):
    """Paceline's scheduler: takes requests, plans the executors' steps, streams tokens."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_SCHEDULER_")

    SECRET_TOKENS: ClassVar[Mapping[str, Identity]] = {
        "client_token": Identity("client", "token", 1.0, MAX_PRIORITY),
        ADMIN_TOKEN: Identity("admin", "token", 1.0, MAX_PRIORITY, admin=True),
    }
    OTHER_SECRETS: ClassVar[frozenset[str]] = DirectorySettings.OTHER_SECRETS | {"executor_token"}
    SECRET_FILES: ClassVar[tuple[str, ...]] = (
        *DirectorySettings.SECRET_FILES,
        "executor_tls_key",
        "executor_token_file",
    )

    # Addresses
    executor: StringList = Field(
        default=("127.0.0.1:50061",),
        min_length=1,
        description="address of an executor; repeat it for failover",
    )
    port: int = Field(default=50051, ge=0, le=65535, description="port to listen on; 0: any free one")
    draft_executor: StringList = Field(
        default=(),
        description="address of an executor with a smaller model, which drafts; repeat it for failover",
    )
    instance: str = Field(
        default="",
        max_length=MAX_INSTANCE,
        pattern=r"^[!-~]*$",
        description="this scheduler's name among those that share an executor; the same after a restart, so"
        " that the caches it had are freed at once; default: host name, hardware address and port (none with"
        " port 0)",
    )

    model_name: str = Field(
        default="",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._:/-]{0,127})?$",
        description="what clients call the model, in place of its own name; default: its own name",
    )

    # Batches and queues
    max_step_tokens: int = Field(
        default=0,
        ge=0,
        le=1 << 20,
        description="tokens computed in one step; 0: 2048 if the executor has a GPU, else 512",
    )
    prefill_chunk_tokens: int = Field(
        default=0,
        ge=0,
        le=1 << 20,
        description="tokens of one prompt computed in one step; 0: 1024 if the executor has a GPU, else 256",
    )
    step_budget_ms: float = Field(
        default=0.0,
        ge=0.0,
        le=600_000.0,
        allow_inf_nan=False,
        description="what a step may take, as predicted, when prompts are computed beside sequences that"
        " decode; 0: 2.5 times what it takes without the prompts",
    )
    max_running: int = Field(default=256, ge=1, le=1 << 16, description="sequences that have a cache")
    steps_in_flight: int = Field(
        default=0,
        ge=0,
        le=64,
        description="steps sent and not answered; 0: 2 if the executor has a GPU, else 1, and one more where "
        "a step takes less than 2 ms on a GPU or 50 ms on CPU",
    )
    max_queued_requests: int = Field(
        default=1024,
        ge=1,
        le=1 << 20,
        description="queued requests; the identities that have any share them by their weights",
    )
    max_queued_requests_per_identity: int = Field(
        default=0,
        ge=0,
        le=1 << 20,
        description="queued requests of one identity; 0: limited by its share of max-queued-requests alone",
    )
    max_queued_tokens: int = Field(
        default=1 << 20, ge=1, le=1 << 30, description="prompt tokens of all queued requests"
    )

    # Speculation
    speculation: SpeculationSetting = Field(
        default="auto",
        description="for requests that do not choose: off, auto, or the number of drafts per verification",
    )
    max_draft_tokens: int = Field(
        default=8, ge=1, le=1024, description="drafts in one verification with auto, at most"
    )

    # Chats
    tool_format: ToolFormatSetting = Field(
        default="auto",
        description="how the model writes calls of tools: none, a format's name, or that of an installed"
        " plugin; auto: as its chat template says, if that is known",
    )

    # Adapters
    adapter: StringList = Field(
        default=(),
        description="adapter that requests may name from the start: NAME, or NAME=DIRECTORY below each"
        " executor's adapter directory; repeat it",
    )

    # Limits of one request
    max_n: int = Field(default=16, ge=1, le=1024, description="completions of one request")
    max_stop_strings: int = Field(default=16, ge=0, le=1024, description="stop strings of one request")
    max_stop_string_bytes: int = Field(default=256, ge=1, le=4096, description="bytes of one stop string")
    max_stop_token_ids: int = Field(default=64, ge=0, le=1024, description="stop token ids of one request")
    max_logit_bias: int = Field(default=1024, ge=0, le=1 << 16, description="logit biases of one request")
    max_logprobs: int = Field(
        default=20, ge=0, le=128, description="most likely tokens returned with each token's logprob"
    )
    max_prompt_bytes: int = Field(
        default=1 << 20, ge=1, le=3 << 20, description="bytes of one prompt's text or messages"
    )
    max_inputs: int = Field(
        default=1024, ge=1, le=4096, description="inputs of one Score, Embed or Rerank call"
    )

    # Times
    failover_timeout_s: float = Field(
        default=60.0, ge=0, le=86400, description="time after which a request without an executor ends"
    )
    watchdog_s: float = Field(
        default=30.0,
        ge=0,
        le=86400,
        description="time without an admission after which the scheduler counts whether what the queue waits"
        " for is there: if so, its state is DEGRADED; 0: never",
    )
    degraded_health: Literal["serving", "not-serving"] = Field(
        default="serving", description="health of a scheduler whose state is DEGRADED"
    )
    vllm_metric_names: bool = Field(
        default=False, description="show metrics under vLLM's names too, where these mean the same"
    )
    stall_timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=86400,
        description="time after which a stream that is not read ends",
    )
    heartbeat_interval_s: float = Field(
        default=1.0, gt=0, le=60, description="time between two heartbeats of an executor"
    )
    heartbeat_timeout_s: float = Field(
        default=10.0,
        gt=0,
        le=600,
        description="time without an answer after which an executor is lost",
    )
    step_timeout_s: float = Field(
        default=120.0,
        gt=0,
        le=86400,
        description="time without progress in a step after which an executor is lost",
    )

    otel_step_share: float = Field(
        default=0.01, ge=0, le=1, description="share of the steps that have spans, with otel"
    )

    # The tokenizer processes
    tokenizer_cpu_s: float = Field(
        default=10.0, gt=0, le=3600, description="CPU time to tokenize one prompt, or to load the tokenizer"
    )
    tokenizer_memory_mib: int = Field(
        default=1536, ge=64, le=1 << 20, description="memory of one tokenizer process"
    )

    # Connections to executors
    executor_tls_ca: Path | None = Field(
        default=None, description="PEM certificate authority of the executors; implies TLS to them"
    )
    executor_tls_cert: Path | None = Field(
        default=None, description="PEM certificate that is sent to executors (mTLS)"
    )
    executor_tls_key: Path | None = Field(default=None, description="PEM private key of that certificate")
    executor_token_file: Path | None = Field(
        default=None, description="file with the token that is sent to executors"
    )

    @model_validator(mode="after")
    def _consistent(self) -> SchedulerSettings:
        check_tls_files(self.executor_security)
        addresses = (*self.executor, *self.draft_executor)
        for address in addresses:
            check_address(address)
        if len(set(addresses)) != len(addresses):
            raise ValueError("--executor, --draft-executor: an address is given twice")
        _ = self.adapters  # raises ValueError if a name is malformed or given twice
        return self

    def check_secrets(self) -> None:
        """Raises ValueError if two tokens are equal or are given twice, or the tokens file is malformed."""
        super().check_secrets()
        _ = self.executor_security

    def security_warnings(self) -> list[str]:
        """As `DirectorySettings`, and one for plaintext connections to executors on other machines."""
        warnings = super().security_warnings()
        addresses = (*self.executor, *self.draft_executor)
        if self.executor_tls_ca is None and (far := [one for one in addresses if not is_loopback(one)]):
            warnings.append(
                f"plaintext to executors beyond this machine ({', '.join(far)}): their token, and all "
                "prompts and outputs, can be read on the way; --executor-tls-ca closes it"
            )
        return warnings

    @property
    def instance_name(self) -> str:
        """`instance`, or its default; "" with port 0, since a restart would choose another port."""
        if self.instance or not self.port:
            return self.instance
        # Host names alone need not be unique. Two schedulers of one name would end each other's sessions.
        machine = f"{socket.gethostname()}-{uuid.getnode():012x}"
        return f"{machine}/{self.address}"[-MAX_INSTANCE:]

    @property
    def core(self) -> CoreConfig:
        """The settings of the scheduler's core."""
        return CoreConfig(
            max_step_tokens=self.max_step_tokens,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            step_budget_s=self.step_budget_ms / 1000,
            max_running=self.max_running,
            max_queued_requests=self.max_queued_requests,
            max_queued_requests_per_identity=self.max_queued_requests_per_identity,
            max_queued_tokens=self.max_queued_tokens,
            failover_timeout_s=self.failover_timeout_s,
            watchdog_s=self.watchdog_s,
            release_wait_s=0.01,
            max_in_flight=self.steps_in_flight,
            max_draft_tokens=self.max_draft_tokens,
        )

    @property
    def drafting(self) -> DraftingOffer:
        """The drafters that requests may choose from, and the drafting of those that do not choose."""
        drafters = ALWAYS_DRAFTERS | ({DraftSource.EXECUTOR} if self.draft_executor else frozenset())
        if self.speculation == "off":
            return DraftingOffer(drafters, DraftingWish())
        length = None if self.speculation == "auto" else int(self.speculation)
        return DraftingOffer(drafters, DraftingWish(drafters, length))

    @property
    def adapters(self) -> dict[str, str]:
        """Directories of `adapter`, by name. Raises ValueError if a name is malformed or given twice."""
        paths: dict[str, str] = {}
        for given in self.adapter:
            name, _, path = given.partition("=")
            if not is_adapter_name(name) or name in paths:
                raise ValueError(
                    f"--adapter {given}: the name must be one of its own, of {ADAPTER_NAME_RULE}"
                )
            paths[name] = path or name
        return paths

    @property
    def request_limits(self) -> RequestAllowance:
        """The settings' limits of one request."""
        return RequestAllowance(
            max_n=self.max_n,
            max_stop_strings=self.max_stop_strings,
            max_stop_string_bytes=self.max_stop_string_bytes,
            max_stop_token_ids=self.max_stop_token_ids,
            max_logit_bias=self.max_logit_bias,
            max_logprobs=self.max_logprobs,
            max_prompt_bytes=self.max_prompt_bytes,
            max_inputs=self.max_inputs,
        )

    @property
    def text_limits(self) -> TextLimits:
        """Limits of a tokenizer process."""
        return TextLimits(memory_mib=self.tokenizer_memory_mib, cpu_s=self.tokenizer_cpu_s)

    @property
    def timing(self) -> Timing:
        """Intervals and timeouts of the connections to executors."""
        return Timing(
            heartbeat_interval_s=self.heartbeat_interval_s,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            step_timeout_s=self.step_timeout_s,
        )

    @property
    def executor_security(self) -> Security:
        """TLS files and token of the connections to executors.

        Raises ValueError if the token file is unreadable or empty, the token is given twice, or a TLS
        certificate is given without its key.
        """
        token = self._sent_token(self.executor_token_file, "executor_token")
        return Security(self.executor_tls_ca, self.executor_tls_cert, self.executor_tls_key, token)
