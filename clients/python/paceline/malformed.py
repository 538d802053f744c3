"""Request bytes that are no message. gRPC itself answers them UNKNOWN, with the parser's own words.

A service's interceptor puts `lenient` around each request deserializer, and answers a `Malformed`
request INVALID_ARGUMENT before its handler sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError


class Malformed:
    """What stands in for a request that can't be parsed."""

    message = "its bytes are not a message of this RPC's type"


def lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """`deserialize`, answering Malformed where it would raise."""
    if deserialize is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return Malformed()

    return parse
