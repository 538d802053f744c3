"""`read_json` and its kin: read untrusted JSON, bounded in bytes and in values before it is parsed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from executor_service.contract.model_error import ModelError

MAX_JSON_BYTES = 16 << 20
"""The index of 65,536 tensors, or the header of a shard with them, has some 8 MiB."""
_MAX_SEPARATORS = 10 << 16
"""Bound of commas plus colons, and so of the number of parsed values; a tensor's entry has 9."""


def parse_json(raw: bytes, where: str) -> dict[str, Any]:
    """A JSON object. Raises ModelError whose message begins with `where`; size is checked before parsing."""
    value = _parsed(raw, where)
    if not isinstance(value, dict):
        raise ModelError(f"{where}: not a JSON object")
    return value


def _parsed(raw: bytes, where: str) -> Any:
    if len(raw) > MAX_JSON_BYTES:
        raise ModelError(f"{where}: {len(raw)} bytes of JSON, at most {MAX_JSON_BYTES} are read")
    check_separators(raw, where, _MAX_SEPARATORS)
    try:
        return json.loads(raw)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ModelError(f"{where}: not readable as JSON: {error}") from None


def check_separators(raw: bytes, where: str, most: int) -> None:
    """Raises ModelError for more than `most` commas and colons, and so for more values than that."""
    separators = raw.count(b",") + raw.count(b":")
    if separators > most:
        raise ModelError(f"{where}: {separators} commas and colons, at most {most} are read")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError naming the file."""
    return parse_json(read_bounded(path, MAX_JSON_BYTES), path.name)


def read_json_objects(path: Path) -> list[dict[str, Any]]:
    """A JSON array of objects from a file. Raises ModelError naming the file."""
    value = _parsed(read_bounded(path, MAX_JSON_BYTES), path.name)
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ModelError(f"{path.name}: not a JSON array of objects")
    return value


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """A whole file of at most `max_bytes`. Raises ModelError naming the file."""
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelError(f"{path.name}: {error.strerror}") from None
    if len(raw) > max_bytes:
        raise ModelError(f"{path.name}: larger than {max_bytes} bytes")
    return raw
