"""Settings of a service, in order of precedence: flags, environment, the YAML file of --config."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from os import environ
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, Self

import yaml
from paceline.bounded_files import others_may_read, read_bounded
from paceline.channel import is_loopback
from paceline.extras import installation
from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from service_kit.command_line import Parser, add_argument, with_plain_switches
from service_kit.credentials import Credentials
from service_kit.identity import MAX_PRIORITY, Identity
from service_kit.known import nearest, unknown_flags, unknown_variables
from service_kit.logs import LogFormat, LogLevel
from service_kit.secrets import read_secrets
from service_kit.security import ServerSecurity, check_tls_files, read_token
from service_kit.token_file import Entry

EXIT_USAGE = 2
"""Exit status when a flag, a variable, the YAML file or the line of secrets is wrong."""

ADMIN_TOKEN = "admin_token"
"""Name of the secret with which the parent process calls the service. Giving it does not make other callers
need tokens."""


def _split(value: object) -> object:
    """Split the strings of a list, or one string, at commas; other values are returned unchanged."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    return [
        item.strip() if isinstance(item, str) else item
        for part in parts
        for item in (part.split(",") if isinstance(part, str) else [part])
    ]


StringList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""A list of strings: a repeatable flag, or values separated by commas."""


class ServiceSettings(BaseSettings):
    """Settings that both services have. A subclass sets `env_prefix`, the port's default and more fields.

    `SECRET_TOKENS`: names of the secrets that are callers' tokens, with the callers' identities.
    `OTHER_SECRETS`: names of the other secrets that standard input may hold. `TOKEN_IS_ADMIN`: whether the
    token of --auth-token-file has admin rights. `SECRET_FILES`: settings with files that others may not read.
    """

    SECRET_TOKENS: ClassVar[Mapping[str, Identity]] = {}
    OTHER_SECRETS: ClassVar[frozenset[str]] = frozenset()
    TOKEN_IS_ADMIN: ClassVar[bool] = False
    SECRET_FILES: ClassVar[tuple[str, ...]] = ("tls_key", "auth_token_file", "tokens_file")

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
    health_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="a further port with health checks alone, in plaintext and without a token, for probes;"
        " 0: any free one",
    )
    health_host: str = Field(default="127.0.0.1", description="address of the health port")
    otel: bool = Field(
        default=False,
        description="send spans by OTLP over gRPC, as the variables OTEL_* say; needs the extra otel",
    )
    reflection: bool = Field(default=False, description="offer gRPC reflection")
    local_socket: Path | None = Field(
        default=None, description="listen on this Unix socket too, without TLS; for the parent process"
    )
    exit_with_stdin: bool = Field(
        default=False, description="when standard input ends, shut down as at SIGTERM: the parent has ended"
    )
    secrets_stdin: bool = Field(
        default=False,
        description="read secrets, one line of JSON, from standard input; implies exit-with-stdin",
    )
    drain_timeout_s: float = Field(
        default=30.0, ge=0, le=86400, description="time after SIGTERM for running requests to finish"
    )
    log_level: LogLevel = Field(default="info", description="lowest severity that is logged")
    log_format: LogFormat = Field(default="auto", description="auto: console on a terminal, else json")
    insecure: bool = Field(default=False, description="allow plaintext on addresses other than loopback")
    tls_cert: Path | None = Field(default=None, description="PEM certificate chain")
    tls_key: Path | None = Field(default=None, description="PEM private key")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM certificate authority; clients must send a certificate of it (mTLS)"
    )
    auth_token_file: Path | None = Field(default=None, description="clients must send this file's token")
    tokens_file: Path | None = Field(
        default=None,
        description="YAML list; clients must send the token of one of its entries, which have the fields"
        " name, sha256, weight, max_priority, admin",
    )

    _secrets: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("host", "metrics_host", "health_host")
    @classmethod
    def _bare(cls, host: str) -> str:
        """Strip the brackets of an IPv6 address: [::1] becomes ::1."""
        return host[1:-1] if host.startswith("[") and host.endswith("]") else host

    @property
    def address(self) -> str:
        """The address to listen on, host:port or [host]:port."""
        return _address(self.host, self.port)

    @property
    def health_address(self) -> str | None:
        """The address of the health port, if there is to be one."""
        return None if self.health_port is None else _address(self.health_host, self.health_port)

    @property
    def bound_to_stdin(self) -> bool:
        """Whether the service shuts down when standard input ends."""
        return self.exit_with_stdin or self.secrets_stdin

    @property
    def server_security(self) -> ServerSecurity:
        """The port's TLS files. Raises ValueError if they do not fit together."""
        return ServerSecurity(self.tls_cert, self.tls_key, self.tls_client_ca)

    @cached_property
    def credentials(self) -> Credentials:
        """The tokens that are accepted, and the identities of their callers. Raises ValueError."""
        fixed = [
            Entry.of(token, self.SECRET_TOKENS[name])
            for name, token in self._secrets.items()
            if name in self.SECRET_TOKENS
        ]
        demanded = any(name in self.SECRET_TOKENS and name != ADMIN_TOKEN for name in self._secrets)
        if token := read_token(self.auth_token_file):
            identity = Identity("token", "token", 1.0, MAX_PRIORITY, self.TOKEN_IS_ADMIN)
            fixed.append(Entry.of(token, identity))
        demanded = demanded or self.auth_token_file is not None or self.tokens_file is not None
        certificates = self.tls_client_ca is not None
        return Credentials(
            fixed,
            self.tokens_file,
            demanded=demanded,
            certificates=certificates,
            open_admin=not demanded and not certificates and is_loopback(self.address),
        )

    def security_warnings(self) -> list[str]:
        """One message for each setting that leaves the service less protected than it could be."""
        warnings = []
        open_to_all = not self.credentials.demanded and self.tls_client_ca is None
        if open_to_all and not is_loopback(self.address):
            warnings.append("no token is demanded: whoever reaches the port is served")
        if self.tls_cert is None and not is_loopback(self.address):
            warnings.append("plaintext beyond this machine: tokens and texts can be read on the way")
        if self.reflection:
            warnings.append("reflection is on: whoever is served can list all methods")
        if self.metrics_port is not None and not is_loopback(f"{self.metrics_host}:{self.metrics_port}"):
            warnings.append("the metrics port is open beyond this machine, in plaintext and without a token")
        for name in self.SECRET_FILES:
            path: Path | None = getattr(self, name)
            if path is not None and others_may_read(path):
                warnings.append(
                    f"--{name.replace('_', '-')}: every user of this machine may read {path}: chmod 600"
                )
        return warnings

    @model_validator(mode="after")
    def _safe(self) -> Self:
        if self.otel and not _has_otlp():
            raise ValueError(f"--otel: OpenTelemetry is not installed; {installation('otel')}")
        for name in ("tls_cert", "tls_key", "tls_client_ca", "auth_token_file", "tokens_file"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"--{name.replace('_', '-')}: no file {path}")
        check_tls_files(self.server_security)
        if self.server_security.cert_file is None and not self.insecure and not is_loopback(self.address):
            raise ValueError(
                f"--host: {self.host} is not loopback: give --tls-cert and --tls-key, or --insecure"
            )
        return self

    @classmethod
    def from_command_line(cls, arguments: Sequence[str], program: str) -> Self:
        """The checked settings of all sources. Mistakes are written to stderr; then exits with EXIT_USAGE."""
        fields = cls.model_fields
        switches = [name for name, field in fields.items() if field.annotation is bool]
        arguments, problems = with_plain_switches(arguments, switches)
        problems += unknown_flags(arguments, fields, switches)
        problems += unknown_variables(environ, cls.model_config.get("env_prefix", ""), fields)
        if problems:
            _quit(program, problems)
        try:
            flags: CliSettingsSource[Any] = CliSettingsSource(
                cls,
                cli_parse_args=list(arguments),
                root_parser=Parser(program, (cls.__doc__ or "").strip()),
                add_argument_method=add_argument,
            )
            settings = cls(**flags())
            settings._take_secrets()
            settings.check_secrets()  # before the service starts anything
        except ValidationError as error:
            _quit(program, [_explain(problem, fields) for problem in error.errors()])
        except (SettingsError, OSError, yaml.YAMLError, TypeError, ValueError) as error:
            _quit(program, [str(error)])
        return settings

    def _take_secrets(self) -> None:
        """With --secrets-stdin, wait for the line of secrets. Raises ValueError if it is malformed."""
        if self.secrets_stdin:
            self._secrets = read_secrets(self.SECRET_TOKENS.keys() | self.OTHER_SECRETS)

    def check_secrets(self) -> None:
        """Raises ValueError if two given tokens or their names are equal, or the tokens file is malformed."""
        _ = self.credentials

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources by precedence: flags and arguments in code, environment, the file of `config`."""
        path = {**env_settings(), **init_settings()}.get("config")
        file = InitSettingsSource(settings_cls, _read_yaml(Path(path)) if path else {})
        return (init_settings, env_settings, file)


def _has_otlp() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.grpc") is not None
    except ModuleNotFoundError:
        return False


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _read_yaml(path: Path) -> dict[str, Any]:
    values = yaml.safe_load(read_bounded(path))
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise TypeError(f"{path}: expected a mapping of settings")
    return {key.replace("-", "_"): value for key, value in values.items()}


def _explain(problem: Any, known: Mapping[str, Any]) -> str:
    """The message of a pydantic validation error, with the setting's name as a flag."""
    name = "-".join(str(part) for part in problem["loc"]).replace("_", "-")
    if problem["type"] == "extra_forbidden":
        return f"{name}: no such setting{nearest(name, [one.replace('_', '-') for one in known])}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"--{name}: {message}" if name else message


def _quit(program: str, problems: Sequence[str]) -> NoReturn:
    sys.stderr.writelines(f"{program}: {problem}\n" for problem in problems)
    raise SystemExit(EXIT_USAGE)
