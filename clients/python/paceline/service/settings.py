"""Settings of a service: flags first, then environment, then the YAML file of --config."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, Self

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from paceline.channel import is_loopback
from paceline.service.logs import LogFormat, LogLevel
from paceline.service.security import ServerSecurity, read_token

EXIT_USAGE = 2
"""A flag, a variable or the YAML is wrong."""


def _split(value: object) -> object:
    """A list from the environment is comma-separated; a flag may be repeated or be so too."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    return [
        item.strip() if isinstance(item, str) else item
        for part in parts
        for item in (part.split(",") if isinstance(part, str) else [part])
    ]


StringList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""A repeatable flag; commas separate too."""


class ServiceSettings(BaseSettings):
    """What both services can be told. A subclass sets `env_prefix`, the port and fields of its own."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        protected_namespaces=(),
        validate_default=True,
    )

    config: Path | None = Field(default=None, description="a YAML file with any of these settings")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(ge=0, le=65535, description="port to listen on; 0: any free one")
    port_file: Path | None = Field(default=None, description="write the port here once listening")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Prometheus on this port; 0: any free one"
    )
    metrics_host: str = Field(default="127.0.0.1", description="address of the metrics port")
    reflection: bool = Field(default=False, description="offer gRPC reflection")
    exit_with_stdin: bool = Field(
        default=False, description="end as at SIGTERM when standard input does: the parent is gone"
    )
    drain_timeout_s: float = Field(
        default=30.0, ge=0, le=86400, description="after SIGTERM, what is live may go on so long"
    )
    log_level: LogLevel = Field(default="info", description="least severity")
    log_format: LogFormat = Field(default="auto", description="auto: console on a terminal, else json")
    insecure: bool = Field(default=False, description="allow plaintext beyond loopback")
    tls_cert: Path | None = Field(default=None, description="PEM certificate chain")
    tls_key: Path | None = Field(default=None, description="PEM private key")
    tls_client_ca: Path | None = Field(default=None, description="PEM; demand client certificates (mTLS)")
    auth_token_file: Path | None = Field(default=None, description="clients must send this file's token")

    @property
    def address(self) -> str:
        """What to bind: host:port."""
        bare = ":" in self.host and not self.host.startswith("[")
        return f"[{self.host}]:{self.port}" if bare else f"{self.host}:{self.port}"

    @property
    def server_security(self) -> ServerSecurity:
        """Towards clients. Raises ValueError."""
        return ServerSecurity(
            self.tls_cert, self.tls_key, self.tls_client_ca, read_token(self.auth_token_file)
        )

    @model_validator(mode="after")
    def _safe(self) -> Self:
        for name in ("tls_cert", "tls_key", "tls_client_ca", "auth_token_file"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"--{name.replace('_', '-')}: no file {path}")
        security = self.server_security
        if security.cert_file is None and not self.insecure and not is_loopback(self.address):
            raise ValueError(
                f"--host: {self.host} is not loopback: give --tls-cert and --tls-key, or --insecure"
            )
        return self

    @classmethod
    def from_command_line(cls, arguments: Sequence[str], program: str) -> Self:
        """Read all sources, check once. A mistake is written to stderr, exit status EXIT_USAGE."""
        try:
            flags: CliSettingsSource[Any] = CliSettingsSource(
                cls, cli_parse_args=list(arguments), cli_prog_name=program
            )
            return cls(**flags())
        except ValidationError as error:
            _quit(program, [_explain(problem) for problem in error.errors()])
        except (SettingsError, OSError, yaml.YAMLError, TypeError) as error:
            _quit(program, [str(error)])

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The order: flags (and what code gives), environment, the file that either of them names."""
        path = {**env_settings(), **init_settings()}.get("config")
        file = InitSettingsSource(settings_cls, _read_yaml(Path(path)) if path else {})
        return (init_settings, env_settings, file)


def _read_yaml(path: Path) -> dict[str, Any]:
    values = yaml.safe_load(path.read_text())
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise TypeError(f"{path}: expected a mapping of settings")
    return {key.replace("-", "_"): value for key, value in values.items()}


def _explain(problem: Any) -> str:
    """A validation error in the words of the command line."""
    name = "-".join(str(part) for part in problem["loc"]).replace("_", "-")
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"--{name}: {message}" if name else message


def _quit(program: str, problems: Sequence[str]) -> NoReturn:
    sys.stderr.writelines(f"{program}: {problem}\n" for problem in problems)
    raise SystemExit(EXIT_USAGE)
