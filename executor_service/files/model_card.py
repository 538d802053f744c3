"""`ModelCard`: what a model's files say of it for people. Nothing of it changes what is computed.

A directory says it in the YAML header of its README.md, and in config.json; a GGUF file in keys `general.*`.
The files are untrusted: they are read up to a bound, what can't be read is left out, and control characters
become spaces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_ENTRIES, MAX_ENTRY_BYTES = 32, 1024
"""Of the metadata; an entry's bytes are those of its name and its value each."""

_MAX_README_BYTES = 64 << 10
_KEY = re.compile(r"(?P<key>[A-Za-z][\w.-]*):(?:\s+(?P<value>.*))?")
_ITEM = re.compile(r"\s*-\s+(?P<value>[^:]*)")
_GENERAL = "general."
_OF_THE_FILE = {"architecture", "alignment", "file_type", "quantization_version"}
"""Keys of GGUF that describe the file, and not the model."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """All for people; empty where the files say nothing."""

    version: str = ""
    license: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


NO_CARD = ModelCard()


def card_of_directory(path: Path, config: Mapping[str, Any]) -> ModelCard:
    """The card of a Hugging Face directory; `config`: its config.json."""
    found = dict(_readme(path / "README.md"))
    for key, name in (("version", "_commit_hash"), ("license", "license")):
        found.setdefault(key, config.get(name))
    found.setdefault("transformers_version", config.get("transformers_version"))
    return _card(found, ("version", "model_version"))


def card_of_gguf(metadata: Mapping[str, Any]) -> ModelCard:
    """The card of a GGUF file with this metadata."""
    general = {key[len(_GENERAL) :]: value for key, value in metadata.items() if key.startswith(_GENERAL)}
    about = {
        key: value
        for key, value in general.items()
        if key not in _OF_THE_FILE and not key.startswith("sampling.")
    }
    return _card(about, ("version",))


def _card(found: Mapping[str, Any], versions: Iterable[str]) -> ModelCard:
    texts = {_shown(key): text for key, value in found.items() if (text := _shown(value))}
    version = next((text for key in versions if (text := texts.pop(key, ""))), "")
    license_ = texts.pop("license", "")
    return ModelCard(version, license_, dict(list(texts.items())[:MAX_ENTRIES]))


def _shown(value: Any) -> str:
    """A value as one line of at most MAX_ENTRY_BYTES bytes; "" for what has no such form."""
    if isinstance(value, list):
        value = ", ".join(filter(None, map(_shown, value[:MAX_ENTRIES])))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    line = "".join(c if c.isprintable() else " " for c in str(value)[:MAX_ENTRY_BYTES]).strip()
    return line.encode(errors="replace")[:MAX_ENTRY_BYTES].decode(errors="ignore")


def _readme(path: Path) -> Iterator[tuple[str, Any]]:
    """The keys of a README's header and their values, texts and lists of texts; maps are left out."""
    try:
        if not path.is_file():
            return
        with path.open("rb") as file:
            lines = file.read(_MAX_README_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return
    if not lines or lines[0].rstrip() != "---" or "---" not in lines[1:]:
        return
    key, items = "", list[str]()
    for line in [*lines[1 : lines.index("---", 1)], "end:"]:
        if (found := _KEY.fullmatch(line)) is not None:
            if key and items:
                yield key, items
            key, items = found["key"], []
            value = (found["value"] or "").strip()
            if value.startswith("[") and value.endswith("]"):
                items = [_plain(item) for item in value[1:-1].split(",")]
            elif value and value[0] not in "{|>&*!#":
                yield key, _plain(value)
        elif (item := _ITEM.fullmatch(line)) is not None:
            items.append(_plain(item["value"]))


def _plain(value: str) -> str:
    """A scalar of YAML without its quotes."""
    value = value.strip()
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
