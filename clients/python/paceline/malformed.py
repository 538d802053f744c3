"""Requests that can't be parsed. By default gRPC answers them UNKNOWN, with the parser's message.

A service's interceptor wraps each request deserializer in `lenient`, and answers a `Malformed` request
with INVALID_ARGUMENT before its handler is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError


class Malformed:
    """Takes the place of a request that can't be parsed."""

    message = "its bytes are not a message of this RPC's type"


def lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """`deserialize`, changed to return Malformed instead of raising DecodeError; None stays None."""
    if deserialize is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return Malformed()

    return parse
