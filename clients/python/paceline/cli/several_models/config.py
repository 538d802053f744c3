"""Which models `serve` serves at one address: names on the command line, or a YAML file of models."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from paceline_router.models import NAME_RULE, is_model_name
from service_kit.known import nearest
from service_kit.model_name import model_name

from paceline.bounded_files import read_bounded
from paceline.channel import is_loopback
from paceline.cli.common import fail
from paceline.cli.gateway_launch import GatewayLaunch
from paceline.cli.models.wheel import DEFAULT_MODEL
from paceline.cli.served_model import default_sampling, draft_config, flags, served_model, served_name
from paceline.cli.several_models.plan import ModelLaunch, ModelsConfig
from paceline.cli.stack import StackConfig

MAX_MODELS = 64
_FIELDS = (
    "name", "model", "backend", "on-demand", "draft-model", "draft-backend", "draft", "executor", "scheduler",
    "adapter-dir", "adapters", "keep-alive-s",
)  # fmt: skip
_ROUTERS = ("tls-cert", "tls-key", "health-port", "health-host", "metrics-port", "metrics-host", "reflection")
_EVERYBODYS = ("tokens-file", "auth-token-file", "drain-timeout-s")
_NOBODYS = (
    "tls-client-ca", "advertise", "advertise-tls-name", "peer", "config", "model-name", "local-socket",
    "port-file",
)  # fmt: skip
_ONE_FOR_ALL = ("tokens-file", "auth-token-file", "tls-cert", "tls-key")
_NOT_HERE = "not with several models (docs/several-models.md)"
_HIDDEN = (
    "TOKENS_FILE", "AUTH_TOKEN_FILE", "CONFIG", "TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA", "ADVERTISE",
    "ADVERTISE_TLS_NAME",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ForAllModels:
    """What the command line says of all models."""

    backend: str
    host: str
    port: int
    token: str
    logs: Sequence[str]
    plain: Sequence[str]  # --insecure, or nothing
    executor: Sequence[str]
    scheduler: Sequence[str]
    memory: int | None = None  # bytes of all processes together; None: no bound


def are_several(given: Sequence[str]) -> bool:
    """Whether these are several models, or a file of models."""
    return len(given) > 1 or any(_is_file_of_models(one) for one in given)


def models_config(given: Sequence[str], shared: ForAllModels, gateway: GatewayLaunch | None) -> ModelsConfig:
    """The models to serve. Exits with an error for what can't be served, before anything is started."""
    keep_alive_s: float | None = None
    if len(given) == 1:
        entries, keep_alive_s = _read(Path(given[0]))
    elif any(_is_file_of_models(one) for one in given):
        fail("give either models or one YAML file of models", 2)
    else:
        entries = [{"model": one} for one in given]
    if not 0 < len(entries) <= MAX_MODELS:
        fail(f"expected 1 to {MAX_MODELS} models, got {len(entries)}", 2)
    own, everybodys, models = _split(shared.scheduler)
    _require_tokens(shared, everybodys)
    # With a bound, all but the first one may be put away for another.
    defaults = [
        {"on-demand": shared.memory is not None and number > 0, "keep-alive-s": keep_alive_s}
        for number in range(len(entries))
    ]
    launches = tuple(
        _launch(default | entry, shared, (*everybodys, *models))
        for default, entry in zip(defaults, entries, strict=True)
    )
    names = [one.name for one in launches]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        fail(f"two models are called {twice[0]}: give them names in a YAML file of models", 2)
    if launches[0].on_demand:
        fail(f"{names[0]}: the first model is what calls mean that name none, so it is not on-demand", 2)
    options = (*shared.logs, *shared.plain, *own, *everybodys)
    return ModelsConfig(launches, shared.host, shared.port, options, shared.token, gateway, shared.memory)


def _is_file_of_models(given: str) -> bool:
    return given.endswith((".yaml", ".yml"))


def bytes_of(text: str | None, option: str) -> int | None:
    """A size as settings have it, "12GB" or "12GiB". Exits with an error for another text."""
    from pydantic import ByteSize, TypeAdapter, ValidationError  # installed with the services only

    try:
        return None if text is None else int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        fail(f"{option}: expected a size like 12GB, got {text!r:.80}", 2)


def _read(path: Path) -> tuple[list[dict[str, Any]], float | None]:
    """The entries of a YAML file, a list under `models`, and `keep-alive-s` beside it.

    Exits with an error that names the entry's field.
    """
    try:
        content = yaml.safe_load(read_bounded(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        fail(f"{path}: {error}", 2)
    entries = content.get("models") if isinstance(content, dict) else None
    if not isinstance(entries, list) or content.keys() - {"models", "keep-alive-s"}:
        fail(f"{path}: expected one list, `models:`, and perhaps `keep-alive-s:`", 2)
    _check_keep_alive(content, str(path))
    for number, entry in enumerate(entries, start=1):
        where = f"{path}: model {number}"
        if not isinstance(entry, dict) or not all(isinstance(key, str) for key in entry):
            fail(f"{where}: expected a mapping", 2)
        for key, value in entry.items():
            if key not in _FIELDS:
                fail(f"{where}: no field is called {key!r:.80}{nearest(key, _FIELDS)}", 2)
            if key == "keep-alive-s":
                continue
            wanted: Any = {"on-demand": bool, "adapters": list}.get(key, str)
            wanted = dict if key in ("executor", "scheduler", "draft") else wanted
            if not isinstance(value, wanted):
                fail(f"{where}: {key}: expected a {wanted.__name__}, got {value!r:.80}", 2)
        _check_keep_alive(entry, where)
    return entries, content.get("keep-alive-s")


def _check_keep_alive(fields: Mapping[str, Any], where: str) -> None:
    """Exit with an error unless the field is missing or a number of seconds above 0."""
    value = fields.get("keep-alive-s")
    if value is not None and not (type(value) in (int, float) and 0 < value < float("inf")):
        fail(f"{where}: keep-alive-s: expected seconds above 0, got {value!r:.80}", 2)


def _launch(entry: Mapping[str, Any], shared: ForAllModels, scheduler: Sequence[str]) -> ModelLaunch:
    backend = entry.get("backend", shared.backend)
    given = entry.get("model")
    if given is not None:
        given = os.path.expanduser(given)
    is_default = given in (None, DEFAULT_MODEL.name)
    path = None if backend != "torch" and is_default else served_model(backend, given)
    own = model_name(path) if path else backend
    name = entry.get("name", served_name(backend, given) or own)
    if not is_model_name(name):
        fail(f"{name[:200]!r} can't be a model's name: {NAME_RULE}", 2)
    directory = (f"--adapter-dir={entry['adapter-dir']}",) if "adapter-dir" in entry else ()
    adapters = tuple(f"--adapter={one}" for one in entry.get("adapters", ()))
    further = _pairs(entry, "scheduler")
    for option in map(_option, further):
        if option in _NOBODYS:
            fail(f"{name}: scheduler: {option}: {_NOT_HERE}", 2)
        if option in _ONE_FOR_ALL:
            fail(f"{name}: scheduler: {option}: one for all models: -S {option}=...", 2)
    executor = (*default_sampling(backend, given), *shared.executor, *_pairs(entry, "executor"))
    draft = entry.get("draft-model")
    return ModelLaunch(
        name,
        StackConfig(
            backend=backend,
            model=path,
            name=name,
            draft=draft_config(
                entry.get("draft-backend"),
                os.path.expanduser(draft) if draft else None,
                [f"{key}={value}" for key, value in entry.get("draft", {}).items()],
                shared.logs,
            ),
            executor_options=(*shared.logs, *directory, *executor),
            scheduler_options=(*shared.logs, *adapters, *scheduler, *further),
            client_token=shared.token,
        ),
        entry.get("on-demand", False),
        tuple(str(one).partition("=")[0] for one in entry.get("adapters", ())),
        entry.get("keep-alive-s"),
    )


def _pairs(entry: Mapping[str, Any], field: str) -> list[str]:
    """Settings of a service as its flags; lists are repeated flags."""
    values = [
        (key, one)
        for key, value in entry.get(field, {}).items()
        for one in (value if isinstance(value, list) else [value])
    ]
    return flags(
        [f"{key}={str(one).lower() if isinstance(one, bool) else one}" for key, one in values], field
    )


def _option(flag: str) -> str:
    return flag.partition("=")[0].removeprefix("--")


def _split(given: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """A scheduler's flags by whose they are: the router's, everybody's, the models' schedulers' alone."""
    own, everybodys, models = list[str](), list[str](), list[str]()
    for flag in given:
        if (name := _option(flag)) in _NOBODYS:
            fail(f"-S {name}: {_NOT_HERE}", 2)
        (own if name in _ROUTERS else everybodys if name in _EVERYBODYS else models).append(flag)
    return own, everybodys, models


def _require_tokens(shared: ForAllModels, everybodys: Sequence[str]) -> None:
    """Exit with an error where the router would not ask for what the schedulers do, or strangers got in."""
    for name in _HIDDEN:
        if os.environ.get(f"PACELINE_SCHEDULER_{name}"):
            option = name.lower().replace("_", "-")
            fail(f"PACELINE_SCHEDULER_{name} is set, which the router does not read: give -S {option}=...", 2)
    tokens = shared.token or any("token" in _option(one) for one in everybodys)
    if not tokens and not is_loopback(f"{shared.host}:0"):
        fail(f"{shared.host} is not loopback: several models need tokens there (docs/security.md)", 2)
