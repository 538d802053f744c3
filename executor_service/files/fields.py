"""`Fields`: typed, bounded reads from a model file's mapping, which is untrusted input."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from executor_service.contract.model_error import ModelError

_MAX_SIZE = 1 << 24  # max of any dimension: far above every known model, far below an overflow


class Fields:
    """A mapping and its file's name. The reading methods raise ModelError naming file, key and value.

    Which keys were read is noted, so that at the end `refuse_unread` finds what nobody asked for.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where
        self._read: set[str] = set()

    def fault(self, message: str) -> ModelError:
        """An error about this file."""
        return ModelError(f"{self.where}: {message}")

    def get(self, key: str, default: Any) -> Any:
        """The value as it is; the default where it is missing or null."""
        self._read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None, max_size: int = _MAX_SIZE) -> int:
        """A whole number from 1 to `max_size`."""
        value = self.get(key, default)
        if value is None:
            raise self.fault(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= max_size:
            raise self.fault(f"{key} is {shown(value)}, expected a whole number from 1 to {max_size}")
        return value

    def count(self, key: str, default: int) -> int:
        """A whole number from 0 to the max of a size."""
        return self.size(key, default) if self.get(key, default) != 0 else 0

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.get(key, default)
        if value is None:
            raise self.fault(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
            raise self.fault(f"{key} is {shown(value)}, expected a positive number")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """A truth value."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fault(f"{key} is {shown(value)}, expected true or false")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids or layer indices without duplicates; empty where the key is missing or null."""
        value = self.get(key, [])
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise self.fault(f"{key} is {shown(value)}, expected token ids")
        return tuple(dict.fromkeys(values))

    def end_ids(self, key: str, vocab_size: int, max_ids: int) -> tuple[int, ...]:
        """Token ids of the vocabulary, at most `max_ids`."""
        ids = self.ids(key)
        if len(ids) > max_ids:
            raise self.fault(f"{key} has {len(ids)} different end ids, at most {max_ids} are supported")
        outside = [i for i in ids if i >= vocab_size]
        if outside:
            raise self.fault(f"{key}: the eos id {outside[0]} lies outside of the vocabulary of {vocab_size}")
        return ids

    def only(self, key: str, accepted: Sequence[Any]) -> None:
        """Raise unless `key` is missing, null or one of the `accepted` values."""
        value = self.get(key, None)
        if value is None or value in accepted:
            return
        named = [shown(one) for one in accepted if one != []]  # that is as if the key were missing
        known = f", only {', '.join(named)}" if named else ""
        raise self.fault(f"{key} {shown(value)} is not supported{known}")

    def ignore(self, *keys: str) -> None:
        """Note that these keys mean nothing here, whatever their values."""
        self._read.update(keys)

    def refuse_unread(
        self, prefix: str = "", why: str = "is not known, and may change what the model computes"
    ) -> None:
        """Raise for a key with this prefix that has a value, and that was neither read nor ignored."""
        for key, value in self.values.items():
            if value is not None and key.startswith(prefix) and key not in self._read:
                raise self.fault(f"the field {key[:80]!r} {why}")


def shown(value: object) -> str:
    """The value for an error message, cut to at most 42 characters."""
    return repr(value if isinstance(value, (int, float)) and abs(value) < 1e30 else str(value)[:40])


def check_apart(where: str, places: Iterable[tuple[int, int, str]]) -> None:
    """Raises ModelError if two tensors of a file share bytes: it could be read as many times its size.

    `places`: first byte, end and name of each.
    """
    for (_, end, name), (begin, _, other) in itertools.pairwise(sorted(places)):
        if begin < end:
            raise ModelError(f"{where}: tensors {name[:80]!r} and {other[:80]!r} share bytes")
