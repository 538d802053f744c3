"""Settings of a service: flags first, then environment, then the YAML file of --config."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, Self

import yaml
from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)


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
    """The base of a service's settings; a subclass sets `env_prefix` and declares the fields."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        validate_default=True,
    )

    config: Path | None = Field(default=None, description="YAML file with any of these settings")

    @classmethod
    def from_command_line(cls, arguments: Sequence[str], program: str) -> Self:
        """Read all sources, check once. A mistake is written to stderr, exit status 2."""
        try:
            path = _config_path(arguments)
            source: CliSettingsSource[Any] = CliSettingsSource(
                cls, cli_parse_args=list(arguments), cli_prog_name=program
            )
            return cls(**{"_cli_settings_source": source, **_read_yaml(path)})
        except ValidationError as error:
            problems = (
                f"{'.'.join(str(part) for part in problem['loc']) or 'settings'}: {problem['msg']}"
                for problem in error.errors()
            )
            _quit(program, "\n".join(problems))
        except (SettingsError, OSError, yaml.YAMLError, TypeError) as error:
            _quit(program, str(error))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment beats the file, which arrives as keyword arguments."""
        return (env_settings, init_settings)


def _config_path(arguments: Sequence[str]) -> Path | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    known, _ = parser.parse_known_args(list(arguments))
    path: Path | None = known.config
    return path


def _read_yaml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    values = yaml.safe_load(path.read_text())
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise TypeError(f"{path}: expected a mapping of settings")
    return {key.replace("-", "_"): value for key, value in values.items()}


def _quit(program: str, message: str) -> NoReturn:
    sys.stderr.write(f"{program}: {message}\n")
    raise SystemExit(2)
