"""Formats of a JSON schema's strings, said in keywords that the grammar engine knows.

Formats that nobody here knows are annotations, as JSON Schema (2020-12, validation, 7.2) has it: they
demand nothing, and a warning says so.
"""

from __future__ import annotations

import json
from typing import Any

from executor_service.grammar.equivalents import demand

_BY_ENGINE = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
_NOTHING = frozenset({"", "password", "binary", "path", "float", "double"})
"""Known, and every value has them: OpenAPI's and pydantic's names of secrets, bytes and doubles."""

_HEX = "[0-9a-fA-F]"
_BASE64 = "^(?:[{0}]{{4}})*(?:[{0}]{{2}}==|[{0}]{{3}}=)?$"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"  # RFC 6901
# RFC 3986, 4.2: a relative reference, without addresses of IPv6.
_UNRESERVED = r"[A-Za-z0-9\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2}"
_SEGMENT = f"(?:{_UNRESERVED}|[:@])"
_RELATIVE = (
    f"^(?://(?:(?:{_UNRESERVED}|:)*@)?(?:{_UNRESERVED})*(?::[0-9]{{0,5}})?(?:/{_SEGMENT}*)*"
    f"|/(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?"
    f"|(?:{_UNRESERVED}|@)+(?:/{_SEGMENT}*)*"
    f"|)(?:\\?(?:{_SEGMENT}|[/?])*)?(?:#(?:{_SEGMENT}|[/?])*)?$"
)


def _regex(groups: int) -> str:
    """A pattern of regular expressions, with groups in groups as deep as this.

    Not of all: of those that ECMA 262, Python and Rust read alike.
    """
    character = r"[^\\^$.|?*+()\[\]{}\x00-\x1f]"
    group = r"\[\^?(?:[A-Za-z0-9_ ]|a-z|A-Z|0-9|\\[dws])+\]"
    atom = rf"(?:{character}|\\[dDwWsSnrt.*+?^$|()\[\]{{}}\\/]|{group}|\."
    atom += rf"|\((?:\?:)?{_regex(groups - 1)}\))" if groups else ")"
    times = r"(?:(?:[*+?]|\{[0-9]{1,2},?\})\??)?"
    terms = rf"(?:{atom}{times}|[\^$]|\\[bB])*"
    return rf"{terms}(?:\|{terms})*"


_DEMANDS: dict[str, dict[str, Any]] = {
    "base64": {"pattern": _BASE64.format("A-Za-z0-9+/")},
    "base64url": {"pattern": _BASE64.format("A-Za-z0-9_-")},
    "ipvanyaddress": {"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]},
    "json-pointer": {"pattern": f"^{_POINTER}$"},
    "regex": {"pattern": f"^{_regex(2)}$"},
    "relative-json-pointer": {"pattern": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$"},
    "uri-reference": {"anyOf": [{"format": "uri"}, {"pattern": _RELATIVE}]},
}
_DEMANDS["byte"] = _DEMANDS["base64"]
for _version in range(1, 9):
    _DEMANDS[f"uuid{_version}"] = {
        "pattern": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}$"
    }

_MAX_NAME = 40  # characters of a format in a warning


def replace_format(schema: dict[str, Any], warnings: list[str]) -> None:
    """Replace the format of this schema in place; what demands nothing here is added to the warnings.

    What it adds is to be looked through for formats, too.
    """
    _replace_encoding(schema, warnings)
    name = schema.get("format")
    if not isinstance(name, str) or name in _BY_ENGINE:
        return
    del schema["format"]
    named = "const" in schema or "enum" in schema  # then the schema says itself which values there are
    if name in _DEMANDS:
        if not named:
            demand(schema, _DEMANDS[name])
    elif name not in _NOTHING:
        warnings.append(f"format {json.dumps(name[:_MAX_NAME])} is not known here: it demands nothing")


def _replace_encoding(schema: dict[str, Any], warnings: list[str]) -> None:
    """What a text encodes: annotations by the standard, of which base64 is demanded."""
    encoding = schema.pop("contentEncoding", None)
    if isinstance(encoding, str) and encoding.lower() in ("base64", "base64url"):
        schema.setdefault("format", encoding.lower())
    elif encoding is not None:
        warnings.append("contentEncoding demands nothing, except base64 and base64url")
    media = schema.pop("contentMediaType", None)
    if (media is not None and media != "text/plain") or schema.pop("contentSchema", None) is not None:
        warnings.append("contentMediaType and contentSchema demand nothing")
