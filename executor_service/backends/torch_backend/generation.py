"""Default sampling parameters: a model's own, from its generation_config.json or GGUF metadata, else ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.service.logs import Log

from executor_service.files.fields import shown

GENERATION_CONFIG = "generation_config.json"

_RANGES: dict[str, tuple[float, float, str]] = {
    "repetition_penalty": (0, 100, "above 0 and up to 100"),
    "temperature": (0, 100, "0 to 100"),
    "top_p": (0, 1, "above 0 and up to 1"),
    "top_k": (0, 2**32 - 1, "a whole number, 0 for none"),
    "min_p": (0, 1, "0 to 1"),
}
"""Minimum and maximum of a request's value, as in the protos."""
_ABOVE_LOWEST = ("repetition_penalty", "top_p")

_DRAWING = frozenset({"temperature", "top_p", "top_k", "min_p"})

FALLBACK = {"temperature": 0.8, "min_p": 0.05}
"""For models that bring nothing about drawing. At temperature 1 over the whole vocabulary, small models soon
draw one of the many tokens that are unlikely each, and lose the thread. Min-p needs no sorting."""

_GGUF_KEYS = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}

log = Log(__name__)


def generation_defaults(config: Mapping[str, Any], where: str) -> dict[str, float]:
    """Defaults from generation_config.json: all of them with `do_sample`, otherwise repetition_penalty alone.

    If nothing is there about drawing, FALLBACK is taken. Values outside a request's valid range are dropped
    with a warning: they would fail every request.
    """
    sampled = config.get("do_sample") is True
    return _with_fallback(_usable_of(config, list(_RANGES) if sampled else ["repetition_penalty"], where))


def gguf_defaults(metadata: Mapping[str, Any], where: str) -> dict[str, float]:
    """Defaults from GGUF metadata (`general.sampling.*`), else FALLBACK.

    Its repetition penalty is left out: it looks back over a window, ours over everything.
    """
    given = {ours: metadata.get(f"general.sampling.{theirs}") for ours, theirs in _GGUF_KEYS.items()}
    return _with_fallback(_usable_of(given, list(given), where))


def _with_fallback(defaults: dict[str, float]) -> dict[str, float]:
    return defaults if defaults.keys() & _DRAWING else {**FALLBACK, **defaults}


def _usable_of(config: Mapping[str, Any], keys: Iterable[str], where: str) -> dict[str, float]:
    defaults = {}
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if _usable(key, value):
            defaults[key] = float(value)
        else:
            log.warning(
                "sampling default ignored", file=where, key=key, value=shown(value), range=_RANGES[key][2]
            )
    return defaults


def _usable(key: str, value: object) -> bool:
    low, high, _ = _RANGES[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        return False
    return not (key in _ABOVE_LOWEST and value == low) and not (key == "top_k" and value != int(value))
