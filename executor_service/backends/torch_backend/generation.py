"""`generation_defaults`: a model's own sampling parameters, from its generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
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

log = Log(__name__)


def generation_defaults(config: Mapping[str, Any], where: str) -> dict[str, float]:
    """Defaults of sampling parameters: all of them with `do_sample`, otherwise repetition_penalty alone.

    Values outside a request's valid range are dropped with a warning: they would fail every request.
    """
    sampled = config.get("do_sample") is True  # otherwise the model's authors mean greedy
    keys = list(_RANGES) if sampled else ["repetition_penalty"]
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
