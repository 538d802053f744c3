"""The tokens that a service accepts, as hashes, and the file that lists them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from paceline.bounded_files import read_bounded
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from service_kit.identity import MAX_PRIORITY, Identity, token_hash

MAX_FILE_BYTES = 4 << 20
MAX_ENTRIES = 10_000


@dataclass(frozen=True, slots=True)
class Entry:
    """An accepted token: its caller's identity, and the token's SHA-256 (32 bytes)."""

    identity: Identity
    digest: bytes

    @classmethod
    def of(cls, token: str, identity: Identity) -> Entry:
        """The entry of a token given in clear text, which is not stored."""
        return cls(identity, bytes.fromhex(token_hash(token)))


class _Line(BaseModel):
    """The fields of one entry in a tokens file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")]
    weight: Annotated[float, Field(ge=0.001, le=1000)] = 1.0
    max_priority: Annotated[int, Field(ge=-MAX_PRIORITY - 1, le=MAX_PRIORITY)] = 0
    admin: bool = False
    directory: bool = False

    def entry(self) -> Entry:
        """The entry that the fields describe."""
        identity = Identity(self.name, "token", self.weight, self.max_priority, self.admin, self.directory)
        return Entry(identity, bytes.fromhex(self.sha256))


_FILE = TypeAdapter(Annotated[list[_Line], Field(max_length=MAX_ENTRIES)])


def read_tokens(path: Path) -> list[Entry]:
    """The entries of a tokens file: a YAML list of mappings with the fields of `_Line`.

    The list may be empty: then no caller has a token. Raises ValueError, naming the file, entry and field.
    """
    try:
        data = read_bounded(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    try:
        return [line.entry() for line in _FILE.validate_python(yaml.safe_load(data))]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        hint = "" if data.lstrip().startswith((b"-", b"[", b"#")) else ": an entry begins with `- {name: `"
        raise ValueError(f"{path}{where}: not YAML{hint}") from error
    except ValidationError as error:
        raise ValueError(f"{path}: {_explain(error.errors(include_url=False)[0])}") from error


def by_digest(entries: list[Entry]) -> dict[bytes, Entry]:
    """The entries by their SHA-256. Raises ValueError if two have the same name or the same token."""
    index: dict[bytes, Entry] = {}
    names: set[str] = set()
    for entry in entries:
        name = entry.identity.name
        if name in names:
            raise ValueError(f"the name {name} is given twice")
        if (other := index.get(entry.digest)) is not None:
            raise ValueError(f"{other.identity.name} and {name} have the same token")
        names.add(name)
        index[entry.digest] = entry
    return index


_HINTS = {
    "name": "1 to 64 letters, digits and . _ @ -",
    "sha256": "the 64 hex digits of the token's SHA-256",
}


def _explain(problem: Any) -> str:
    """The message of a validation error, without the given value, which may be a token in clear text."""
    index, *field = problem["loc"] or (None,)
    if index is None:
        return "expected a list of entries"
    name = str(field[0]) if field else ""
    if problem["type"] == "extra_forbidden":
        return f"entry {index + 1}: {name}: no such field; there are {', '.join(_Line.model_fields)}"
    hint = _HINTS.get(name)
    what = f"expected {hint}" if hint and problem["type"] != "missing" else problem["msg"]
    return f"entry {index + 1}: {name + ': ' if name else ''}{what}"
