"""The spec of a fleet: what SPEC.yaml says, checked before anything starts. Pure but for reading files."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from paceline.bounded_files import read_bounded
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from service_kit.known import nearest
from service_kit.security import ServerSecurity

MAX_STACKS = 256
_NAME = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
_FLEET_FLAGS = {
    "host": "`address` chooses it",
    "port": "`ports` chooses it",
    "port-file": "the fleet reads it",
    "local-socket": "the fleet uses it",
    "executor": "a stack has its own",
    "advertise": "`address` and `ports` choose it",
    "advertise-tls-name": "`tls.name` is it",
    "peer": "the fleet fills the directory",
    "tokens-file": "`tokens` names it",
    "auth-token-file": "`tokens` names the tokens",
    "tls-cert": "`tls` names it",
    "tls-key": "`tls` names it",
    "drain-timeout-s": "`drain_timeout_s` of the model is it",
    "secrets-stdin": "the fleet uses it",
    "insecure": "`insecure` of the fleet is it",
    "backend": "`backend` of the model is it",
    "model": "`model` of the model is it",
    "tensor-parallel": "ranks of a fleet's executors aren't offered yet",
}
"""Options of services that the fleet itself sets, with the reason why a spec may not."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Replicas(_Part):
    """How many stacks a model has. With `max` above `min` their number follows the load."""

    min: Annotated[int, Field(ge=1, le=MAX_STACKS)] = 1
    max: Annotated[int, Field(ge=1, le=MAX_STACKS)] = 1
    target: Annotated[int, Field(ge=1, le=1 << 16)] = 32
    """Sequences, running and waiting, of one stack above which time per token breaks."""
    max_wait_s: Annotated[float, Field(gt=0, le=3600)] = 2.0
    """Predicted wait of a request above which a stack is added."""

    @model_validator(mode="before")
    @classmethod
    def _number(cls, given: object) -> object:
        if isinstance(given, int) and not isinstance(given, bool):
            given = {"min": given, "max": given}
        if isinstance(given, dict) and given.get("min") == 0:
            raise ValueError(
                "0 stacks aren't offered: a fleet without any has no address; `paceline fleet down` ends it"
            )
        if isinstance(given, dict) and "min" in given and "max" not in given:
            return {**given, "max": given["min"]}
        return given

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        return self


def _texts(given: object) -> object:
    """Values of options as their command line has them; YAML reads some as numbers and booleans."""
    if not isinstance(given, dict):
        return given
    plain = {True: "true", False: "false"}
    return {
        str(name).replace("_", "-"): plain[value] if isinstance(value, bool) else str(value)
        for name, value in given.items()
        if not isinstance(value, dict | list) and value is not None
    } | {str(name): value for name, value in given.items() if isinstance(value, dict | list) or value is None}


Options = Annotated[dict[str, str], BeforeValidator(_texts)]


class FleetModel(_Part):
    """A model, the stacks that serve it, and what each of them takes of its node."""

    name: Annotated[str, Field(pattern=_NAME)]
    backend: str = "torch"
    model: str | None = None  # as `paceline serve MODEL`, fetched where it is missing; None: the default
    executors: int = 1
    executor: Options = Field(default_factory=dict)
    scheduler: Options = Field(default_factory=dict)
    replicas: Replicas = Replicas()
    cpus: Annotated[float, Field(ge=0, le=4096)] = 1.0
    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    labels: dict[str, str] = Field(default_factory=dict)  # of the nodes on which it may be, as Ray has them
    per_node: Annotated[int | None, Field(ge=1, le=MAX_STACKS)] = None
    surge: Annotated[int, Field(ge=0, le=100)] = 100
    """Percent of the stacks that an update may start beside the old ones; 0: old ones stop first."""
    drain_timeout_s: Annotated[float, Field(ge=0, le=3600)] = 5.0
    """Time for a stopping stack's streams to end; clients continue the others elsewhere, exactly."""

    @model_validator(mode="after")
    def _offered(self) -> Self:
        if self.name == "roster":
            raise ValueError("the name roster is the fleet's own")
        if self.executors != 1:
            raise ValueError(
                f"executors: {self.executors}: a stack of a fleet has one; standbys aren't offered yet"
            )
        for service in ("executor", "scheduler"):
            for name in getattr(self, service):
                if name in _FLEET_FLAGS:
                    raise ValueError(f"{service}.{name} can't be set here: {_FLEET_FLAGS[name]}")
        return self

    @property
    def version(self) -> str:
        """What changes exactly when running stacks have to be replaced."""
        return _digest(
            self.model_dump(include={"backend", "model", "executor", "scheduler", "drain_timeout_s"})
        )

    def flags(self, service: Literal["executor", "scheduler"]) -> tuple[str, ...]:
        """The options of a service as flags of its command line."""
        return tuple(f"--{name}={value}" for name, value in getattr(self, service).items())


class TokenFiles(_Part):
    """Files of tokens, which lie on every node under the same path."""

    clients: Path  # tokens.yaml of the schedulers, with the stacks' entries
    stacks: Path  # the stacks' tokens, one a line, each with the right `directory` in the other file


class TlsFiles(_Part):
    """TLS files, which lie on every node under the same path."""

    cert: Path
    key: Path
    ca: Path  # the authority of all the stacks
    name: Annotated[str, Field(max_length=255)] = ""
    """The name in the certificate; empty: each node's address."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Those of a scheduler."""
        name = (f"--advertise-tls-name={self.name}",) if self.name else ()
        return (f"--tls-cert={self.cert}", f"--tls-key={self.key}", *name)


class RayCluster(_Part):
    """The Ray cluster to use, and the file of its token."""

    address: Annotated[str, Field(pattern=r"^[^\s:/]+:\d{1,5}$|^\[[0-9a-f:]+\]:\d{1,5}$")]
    token_file: Path


class FleetSpec(_Part):
    """A fleet: models and where their stacks listen."""

    fleet: Annotated[str, Field(pattern=_NAME)]
    models: Annotated[tuple[FleetModel, ...], Field(min_length=1, max_length=64)]
    address: Literal["loopback", "ip", "hostname"] = "loopback"
    ports: Annotated[str | None, Field(pattern=r"^\d{1,5}-\d{1,5}$")] = None
    insecure: bool = False
    tokens: TokenFiles | None = None
    tls: TlsFiles | None = None
    ray: RayCluster | None = None
    home: Path | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"models: the name {name} is given twice")
        if self.address != "loopback" and self.tls is None and not self.insecure:
            raise ValueError(f"address: {self.address} is beyond loopback: give `tls`, or insecure: true")
        if self.slots > MAX_STACKS:
            raise ValueError(f"models: {self.slots} stacks with surge, at most {MAX_STACKS}")
        if self.ports is not None and not 0 < self.port_range.start < self.port_range.stop <= 65536:
            raise ValueError(f"ports: {self.ports} is no range of ports")
        if self.ports is not None and len(self.port_range) < 2:
            raise ValueError("ports: a stack takes two")
        return self

    @property
    def port_range(self) -> range:
        """The ports of the stacks; empty: any."""
        first, _, last = (self.ports or "0--1").partition("-")
        return range(int(first), int(last) + 1)

    @property
    def slots(self) -> int:
        """Stacks that can be there at once, with those of an update and those that are just ending."""
        return sum(one.replicas.max + max(1, one.replicas.max * one.surge // 100) for one in self.models)

    @property
    def directory(self) -> Path:
        """Where the fleet keeps its files on the machine of its commands, and its tokens on every node."""
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return (self.home or Path(state) / "paceline" / "fleets" / self.fleet).expanduser()

    @property
    def token_files(self) -> TokenFiles:
        """The given files, else those that `fleet up` makes."""
        return self.tokens or TokenFiles(
            clients=self.directory / "tokens.yaml", stacks=self.directory / "stack-tokens"
        )

    def common(self) -> dict[str, Any]:
        """What all stacks are given beside their model: names of files, never what is in them."""
        return {
            "fleet": self.fleet,
            "address": self.address,
            "ports": self.ports,
            "insecure": self.insecure,
            "tokens": self.token_files.model_dump(mode="json"),
            "tls": self.tls.model_dump(mode="json") if self.tls else None,
        }

    def version_of(self, model: FleetModel) -> str:
        """What changes exactly when the model's running stacks have to be replaced."""
        return _digest([self.common(), model.version])

    def check_files(self) -> None:
        """Raises ValueError, with the field, for a file that can't be used on this machine."""
        if self.tls is not None:
            files = {"cert": self.tls.cert, "key": self.tls.key, "ca": self.tls.ca}
            for name, path in files.items():
                _require(f"tls.{name}", path)
            try:
                ServerSecurity(self.tls.cert, self.tls.key, self.tls.ca).check_files()
            except OSError as error:
                raise ValueError(f"tls: {error.filename}: {error.strerror}") from None
        if self.ray is not None:
            _require("ray.token_file", self.ray.token_file)


def read_spec(path: Path) -> FleetSpec:
    """The spec in a YAML file. Raises ValueError, with the file and each wrong field on a line of its own.

    Paths in it are relative to the file.
    """
    try:
        values = yaml.safe_load(read_bounded(path))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ValueError(f"{path}{f', line {mark.line + 1}' if mark else ''}: not YAML") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping with `fleet` and `models`")
    try:
        return FleetSpec.model_validate(_absolute(values, path.resolve().parent))
    except ValidationError as error:
        problems = error.errors(include_url=False)
        if len(problems) > 1:  # pydantic adds that a list has too few valid items
            problems = [one for one in problems if one["type"] != "too_short"] or problems
        raise ValueError("\n".join(f"{path}: {_explain(one)}" for one in problems)) from None


def _absolute(values: dict[str, Any], base: Path) -> dict[str, Any]:
    def resolved(part: object, keys: tuple[str, ...]) -> object:
        if not isinstance(part, dict):
            return part
        return {
            key: str(base / Path(value).expanduser()) if key in keys and isinstance(value, str) else value
            for key, value in part.items()
        }

    found = dict(values)
    found["tokens"] = resolved(values.get("tokens"), ("clients", "stacks"))
    found["tls"] = resolved(values.get("tls"), ("cert", "key", "ca"))
    found["ray"] = resolved(values.get("ray"), ("token_file",))
    return resolved(found, ("home",))  # type: ignore[return-value]


def _explain(problem: Any) -> str:
    where = ""
    for part in problem["loc"]:
        if not re.fullmatch(r"function-.*|str|int", str(part)):
            where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else str(part)
    if problem["type"] == "extra_forbidden":
        kinds: dict[str, type[BaseModel]] = {
            "models": FleetModel,
            "tokens": TokenFiles,
            "tls": TlsFiles,
            "ray": RayCluster,
        }
        kind = kinds.get(str(problem["loc"][0]), FleetSpec) if len(problem["loc"]) > 1 else FleetSpec
        if "replicas" in problem["loc"]:
            kind = Replicas
        return f"{where}: no such field{nearest(str(problem['loc'][-1]), list(kind.model_fields))}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def _require(field: str, path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{field}: no file {path}")


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
