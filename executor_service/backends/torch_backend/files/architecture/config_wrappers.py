"""`text_part`: the text model in the config.json of a model that takes images as well."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from executor_service.backends.torch_backend.files.architecture.config_fields import HARMLESS
from executor_service.contract.model_error import ModelError
from executor_service.files.fields import Fields, shown

_TEXT = "text_config"
_SHARED = ("eos_token_id", "tie_word_embeddings")  # beside `text_config` they come first
_OURS = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.", "score.")
_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("", ""),
)
"""Beginnings of names in the files, and what a text model has for them."""


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A kind of model with a text model inside."""

    text: tuple[str, ...]  # `model_type`s of the text model; the first one if it says none
    fields: frozenset[str]  # of config.json, about images and videos
    tied: bool = False  # default of `tie_word_embeddings`
    flat: bool = False  # its fields may be beside the others, without `text_config` or in both places


_VISION_IDS = frozenset(
    {"image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id"}
)
WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper(
        ("gemma3_text",),
        frozenset(
            {
                "mm_tokens_per_image",
                *(f"{what}_token_{kind}" for what in ("boi", "eoi", "image") for kind in ("id", "index")),
            }
        ),
        tied=True,
    ),
    "mistral3": Wrapper(
        ("mistral", "ministral3"),
        frozenset(
            {
                "image_token_id",
                "image_token_index",
                "multimodal_projector_bias",
                "projector_hidden_act",
                "spatial_merge_size",
                "vision_feature_layer",
            }
        ),
        tied=True,
    ),
    "qwen2_vl": Wrapper(("qwen2_vl_text",), _VISION_IDS, flat=True),
    "qwen2_5_vl": Wrapper(("qwen2_5_vl_text",), _VISION_IDS, flat=True),
    "qwen3_vl": Wrapper(("qwen3_vl_text",), _VISION_IDS),
}
"""By `model_type` of config.json."""


def text_part(config: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], str]:
    """The fields of the text model, and their place for errors; `config` itself if it has no wrapper.

    Raises ModelError for another kind of text model, and for fields beside it that are not about images.
    """
    kind = config.get("model_type")
    wrapper = WRAPPERS.get(kind) if isinstance(kind, str) else None
    if wrapper is None:
        return config, where
    f = Fields(config, where)
    beside = {"model_type", "vision_config", "quantization_config", *_SHARED, *wrapper.fields}
    given = f.get(_TEXT, None)
    if given is None and wrapper.flat:
        inside: Mapping[str, Any] = {key: config[key] for key in config if key not in beside}
    else:
        if not isinstance(given, Mapping):
            raise f.fault(f"{_TEXT} is {shown(given)}, expected an object")
        f.ignore(*HARMLESS, *beside)
        if wrapper.flat:  # transformers 4.52 to 4.56 writes the text fields, and more, into both places
            given = {key: value for key, value in given.items() if key not in wrapper.fields}
            for key in sorted(config.keys() & given.keys() - beside - HARMLESS):
                if key == "sliding_window" and given[key] is None:
                    f.ignore(key)  # a window that is not in use
                elif f.get(key, None) not in (None, given[key]):
                    raise f.fault(f"{key} {shown(config[key])} is not that of {_TEXT}, {shown(given[key])}")
        f.refuse_unread()
        inside, where = given, f"{where}: {_TEXT}"
    text = inside.get("model_type") or wrapper.text[0]
    if text not in wrapper.text:
        known = ", ".join(wrapper.text)
        raise ModelError(f"{where}: model_type {shown(text)} is not supported in {kind}, only {known}")
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    if wrapper.flat and inside.get("tie_word_embeddings") is True:  # in either place, as in transformers
        shared["tie_word_embeddings"] = True
    return {"tie_word_embeddings": wrapper.tied, **inside, **shared, "model_type": text}, where


def text_names(stored: Collection[str], where: str) -> dict[str, str]:
    """The stored names of the text model's tensors, by those that they have in a model without a wrapper.

    Raises ModelError if two of them are one tensor of the text model, or one is of no part of it.
    """
    names: dict[str, str] = {}
    for name in stored:
        prefix, ours = next(pair for pair in _PREFIXES if name.startswith(pair[0]))
        inner = ours + name.removeprefix(prefix)
        if not inner.startswith(_OURS):
            if prefix:
                raise ModelError(
                    f"{where}: tensor {name[:80]!r} is in the file, but its text model has no use for it"
                )
        elif names.setdefault(inner, name) != name:
            raise ModelError(f"{where}: tensors {names[inner]!r} and {name!r} are the same part of a model")
    return names


def modules_beside(stored: Collection[str], names: Mapping[str, str]) -> list[str]:
    """The modules of which no tensor is in `names`, such as "vision_tower"."""
    used = set(names.values())
    left = {name.removeprefix("model.").split(".", 1)[0] for name in stored if name not in used}
    return sorted(left)
