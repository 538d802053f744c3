"""Fields that chats and completions share, and the SDK's options that they become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline import ModelInfo

from paceline_openai.fields import (
    Field,
    array,
    boolean,
    integer,
    mapping,
    number,
    only,
    shown,
    text,
    texts,
    tokens,
    wrong,
)
from paceline_openai.refusals import bad

INT32 = (1 << 31) - 1
UINT32 = (1 << 32) - 1
_LABELS = 16  # OpenAI's bounds of metadata
_LABEL_NAME, _LABEL_TEXT = 64, 512
_STRUCTURED = {
    "json": "schema",
    "regex": "regex",
    "choice": "choices",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""The SDK's options by the keys of `structured_outputs`."""
_GUIDED = {
    name if name == "structural_tag" else f"guided_{name}": option for name, option in _STRUCTURED.items()
}


def top_k(value: Any, name: str) -> int:
    """A count; -1 is 0, off, as elsewhere."""
    return max(0, int(integer(-1, UINT32)(value, name)))


def seed(value: Any, name: str) -> int:
    """A 64-bit integer, signed or not: -1 is the largest."""
    return int(integer(-(1 << 63), (1 << 64) - 1)(value, name)) & ((1 << 64) - 1)


def logit_bias(value: Any, name: str) -> dict[int, float]:
    """Token ids, as strings, to numbers."""
    found = {}
    for key, bias in mapping(value, name).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= UINT32):
            raise bad(name, f"{name}: {shown(key)} is no token id")
        found[int(key)] = number(bias, f"{name}.{key}")
    return found


def labels(value: Any, name: str) -> dict[str, str]:
    """At most 16 names of 64 characters, with texts of 512."""
    given = mapping(value, name)
    if len(given) > _LABELS:
        raise bad(name, f"{name}: expected at most {_LABELS} entries, got {len(given)}")
    for key, content in given.items():
        if (
            not 0 < len(text(key, name)) <= _LABEL_NAME
            or len(text(content, f"{name}.{key[:80]}")) > _LABEL_TEXT
        ):
            raise bad(
                name,
                f"{name}: expected names of 1 to {_LABEL_NAME} and texts of up to {_LABEL_TEXT} characters",
            )
    return given


def label(value: Any, name: str) -> str:
    """A text of at most 512 characters."""
    if len(text(value, name)) > _LABEL_TEXT:
        raise bad(name, f"{name}: expected at most {_LABEL_TEXT} characters")
    return str(value)


def stream_options(value: Any, name: str) -> dict[str, Any]:
    """`include_usage`; `include_obfuscation` false."""
    given = mapping(value, name)
    only(given, name, "include_usage", "include_obfuscation")
    for key in given:
        if given[key] is not None:
            boolean(given[key], f"{name}.{key}")
    if given.get("include_obfuscation"):
        place = f"{name}.include_obfuscation"
        raise bad(place, f"{place}: streams are not padded here", "unsupported_value")
    return given


def schema(value: Any, name: str) -> Any:
    """A JSON schema: an object, or its JSON."""
    if not isinstance(value, dict | str):
        raise wrong(name, "a JSON schema", value)
    return value


def structured_outputs(value: Any, name: str) -> dict[str, Any]:
    """One of vLLM's kinds of constraints."""
    given = mapping(value, name)
    only(given, name, *_STRUCTURED, "json_object")
    return given


SHARED = (
    Field("model", text, "the model, an adapter, or the name of `--served-model-name`; without it the model"),
    Field("stream", boolean, "server-sent events; those of chats and completions end with `[DONE]`"),
    Field("stream_options", stream_options, "`include_usage`; `include_obfuscation` is taken if false"),
    Field("temperature", number, "0: greedy; up to 100, where OpenAI's ends at 2"),
    Field("top_p", number, "as in OpenAI's API"),
    Field("top_k", top_k, "0 or -1: off"),
    Field("min_p", number, "least probability, as a share of the likeliest token's"),
    Field("presence_penalty", number, "-100 to 100"),
    Field("frequency_penalty", number, "-100 to 100"),
    Field("repetition_penalty", number, "sees prompt and output; 1: off"),
    Field("logit_bias", logit_bias, "token ids to numbers from -1000 to 1000"),
    Field("seed", seed, "64 bits; the same seed gives the same tokens, by gRPC too"),
    Field("n", integer(0, UINT32), "completions"),
    Field("stop", texts, "a text or a list of texts"),
    Field("stop_token_ids", tokens, "token ids that end the output"),
    Field("include_stop_str_in_output", boolean, "the text ends with the stop string"),
    Field("ignore_eos", boolean, "the model's own end does not end the output"),
    Field("min_tokens", integer(0, UINT32), "no end before this number of tokens"),
    Field("user", label, "a label in the scheduler's log; no identity"),
    Field("metadata", labels, "labels in the scheduler's log"),
    Field("cache_salt", text, "prompts share cached beginnings under the same salt alone"),
    Field("priority", integer(-INT32 - 1, INT32), "higher is first; **vLLM's is the other way round**"),
    Field("return_token_ids", boolean, "`token_ids` of each choice"),
    Field("structured_outputs", structured_outputs, "`json`, `regex`, `choice`, `grammar` (Lark's syntax),"
          " `structural_tag` or `json_object`"),
    Field("guided_json", schema, "as `structured_outputs.json`"),
    Field("guided_regex", text, "as `structured_outputs.regex`"),
    Field("guided_choice", array, "as `structured_outputs.choice`"),
    Field("guided_grammar", text, "as `structured_outputs.grammar`"),
    Field("structural_tag", schema, "as `structured_outputs.structural_tag`"),
    Field("skip_special_tokens", None, "texts have no control tokens; ask for `return_token_ids`", (True,)),
    Field("spaces_between_special_tokens", None, "texts have no control tokens", (True,)),
    Field("use_beam_search", None, "there is no beam search", (False,)),
    Field("length_penalty", None, "there is no beam search", (1, 1.0)),
)  # fmt: skip

_SAME = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "cache_salt", "priority",
)  # fmt: skip


def sampling_options(values: Mapping[str, Any], info: ModelInfo) -> dict[str, Any]:
    """The SDK's options of the shared fields. Raises Refusal where the model or its scheduler can't do it."""
    options = {name: values[name] for name in _SAME if name in values}
    options["n"], most = values.get("n", 1), max(1, info.limits.max_n)
    if not 1 <= options["n"] <= most:  # here, as each has its state in the client before a scheduler refuses
        raise bad("n", f"n: expected 1 to {most}, got {options['n']}")
    if "stream_options" in values and not values.get("stream"):
        raise bad("stream_options", "stream_options: only with stream")
    if "include_stop_str_in_output" in values:
        options["include_stop_string"] = values["include_stop_str_in_output"]
    grammars = [(name, option, values[name]) for name, option in _GUIDED.items() if name in values]
    for name, value in values.get("structured_outputs", {}).items():
        if value is None or (name == "json_object" and value is False):
            continue
        place = f"structured_outputs.{name}"
        grammars.append((place, "schema", {"type": "object"}) if name == "json_object"
                        else (place, _STRUCTURED[name], value))  # fmt: skip
    add_grammars(options, grammars)
    return options | label_options(values, info)


def add_grammars(options: dict[str, Any], grammars: list[tuple[str, str, Any]]) -> None:
    """Add (field, SDK's option, value); raises Refusal if there are several."""
    for name, option, value in grammars:
        if set(options) & {"schema", "regex", "choices", "grammar", "structural_tag"}:
            raise bad(name, f"{name}: the output can have one constraint, and the request has several")
        if option == "choices":
            value = texts(array(value, name), name)
        elif option in ("regex", "grammar"):
            value = text(value, name)
        else:
            value = schema(value, name)
        options[option] = value


def grammar_name(values: Mapping[str, Any]) -> dict[str, str]:
    """The field that has the request's grammar, by `response_format`: what errors of grammars are about."""
    fields = (*_GUIDED, "structured_outputs", "response_format", "text")
    given = next((one for one in fields if values.get(one) is not None), None)
    return {"response_format": given} if given else {}


def label_options(values: Mapping[str, Any], info: ModelInfo) -> dict[str, Any]:
    """The labels of `user`, `safety_identifier` and `metadata`."""
    found = {**values.get("metadata", {})}
    for name in ("user", "safety_identifier"):
        if name in values:
            found[name] = values[name]
    if not found:
        return {}
    if "labels" not in info.capabilities:
        [name, *_] = [one for one in ("user", "safety_identifier", "metadata") if one in values]
        raise bad(name, f"{name}: the scheduler takes no labels", "unsupported_parameter")
    return {"labels": found}
