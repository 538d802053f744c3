"""Default sampling parameters: a model's own, from its generation_config.json or GGUF metadata, else ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from service_kit.logs import Log

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

GREEDY = {"temperature": 0.0}

_GGUF_KEYS = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}

_OFF: dict[str, object] = {
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "suppress_tokens", "sequence_bias"), ()),
    **dict.fromkeys(("constraints", "force_words_ids", "forced_decoder_ids", "stop_strings"), ()),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("min_new_tokens", "epsilon_cutoff", "eta_cutoff", "diversity_penalty"), 0),
    **dict.fromkeys(("max_new_tokens", "max_time", "penalty_alpha", "top_h", "watermarking_config")),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "typical_p"), 1),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("token_healing", "dola_layers"), False),
    "max_length": 20,  # the default of transformers before 5, which it wrote into files
}
"""Fields of generation_config.json that are not applied, each with the value that changes no text."""

_GGUF_OFF: dict[str, object] = {
    "xtc_probability": 0,
    "mirostat": 0,
    "penalty_repeat": 1,  # looks back over a window; ours over everything
    "sequence": (),  # the order of the others
}
"""The same of GGUF files: keys under `general.sampling`."""

log = Log(__name__)


def sampling_value(name: str, value: float) -> float:
    """The value of a sampling parameter. Raises ValueError for another name, or out of a request's range."""
    if name not in _RANGES:
        raise ValueError(f"{name!r} is none of {', '.join(_RANGES)}")
    if not _usable(name, value):
        raise ValueError(f"{name} is {_RANGES[name][2]}")
    return value


def generation_defaults(config: Mapping[str, Any], where: str) -> dict[str, float]:
    """Defaults from generation_config.json: all of them with `do_sample`, otherwise repetition_penalty alone.

    An explicit `do_sample` of false is GREEDY. If nothing is there about drawing, FALLBACK is taken. Values
    outside a request's valid range are dropped with a warning: they would fail every request.
    """
    sampled = config.get("do_sample") is True
    defaults = _usable_of(config, list(_RANGES) if sampled else ["repetition_penalty"], where)
    return defaults | GREEDY if config.get("do_sample") is False else _with_fallback(defaults)


def name_ignored(config: Mapping[str, Any], where: str) -> None:
    """Log what a file says of every text that is generated, and is not applied."""
    _name_ignored(config, _OFF, where)


def _name_ignored(given: Mapping[str, Any], off: Mapping[str, object], where: str) -> None:
    ignored = {
        key: shown(given[key]) for key, value in off.items() if given.get(key) not in (None, value, [], {})
    }
    if ignored:
        log.warning("generation settings not applied", file=where, **ignored)


def gguf_defaults(metadata: Mapping[str, Any], where: str) -> dict[str, float]:
    """Defaults from GGUF metadata (`general.sampling.*`), else FALLBACK. Logs what is not applied."""
    prefix = "general.sampling."
    others = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    _name_ignored(others, _GGUF_OFF, where)
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
