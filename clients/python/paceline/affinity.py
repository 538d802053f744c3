"""Which of several schedulers gets a request: AFFINITY in scheduler.proto. Pure.

Requests with the same beginning go to the same scheduler, whose prefix cache then has it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from paceline.scheduler.v1 import scheduler_pb2 as pb

VERSION = "paceline-affinity-1"
MAX_TEXT_BYTES = 1024
MAX_TOKEN_IDS = 256
_NOTHING: Mapping[str, int] = MappingProxyType({})


def affinity_key(request: pb.GenerateRequest, own: str = "") -> bytes:
    """32 bytes that requests with the same beginning share. `own`: the caller's key, in place of them."""
    if own:
        return own_key(own)
    parts = [_string(VERSION), _string(request.model), _string(request.cache_salt)]
    match request.WhichOneof("prompt"):
        case "messages":
            parts.append(b"m")
            for message in request.messages.messages:
                content = message.content or "".join(part.text for part in message.parts)
                parts += map(_string, (message.role, message.name, content))
                if message.role == "user":
                    break
        case "text":
            # A character has at most four bytes: this many are enough, and no more of a long text is encoded.
            beginning = request.text[:MAX_TEXT_BYTES].encode()[:MAX_TEXT_BYTES]
            parts += b"t", _string(beginning.decode(errors="ignore"))
        case "token_ids":
            ids = request.token_ids.ids[:MAX_TOKEN_IDS]
            parts += b"i", struct.pack(f"<{len(ids)}I", *ids)
    return hashlib.sha256(b"".join(parts)).digest()


def own_key(own: str) -> bytes:
    """The key of a caller's own."""
    return hashlib.sha256(own.encode()).digest()


def preference(key: bytes, addresses: Sequence[str]) -> list[str]:
    """The addresses, that of the scheduler with the highest weight first."""

    def rank(address: str) -> tuple[int, bytes]:
        encoded = address.encode()
        return -int.from_bytes(hashlib.sha256(key + encoded).digest()[:8], "big"), encoded

    return sorted(addresses, key=rank)


def choice(key: bytes, live: Mapping[str, int], reported: Mapping[str, int] = _NOTHING) -> str:
    """The address for a request. Raises ValueError for none.

    `live`: the client's own streams at each scheduler; `reported`: the sequences of all clients there, as the
    directory has them. One that says that it has none gets no more of the client's streams for that.
    """
    if not live:
        raise ValueError("no scheduler to choose from")
    return first_choice(preference(key, list(live)), live, reported)


def first_choice(
    preferred: Sequence[str],
    live: Mapping[str, int],
    reported: Mapping[str, int] = _NOTHING,
    extra: int = 0,
) -> str:
    """As `choice`, of addresses in a key's order of preference; each may have `extra` sequences more."""
    least, most = _bound(live) + extra, _bound(reported) + extra
    fewer = [address for address in preferred if live[address] < least]
    return next((address for address in fewer if reported.get(address, 0) < most), fewer[0])


def _bound(loads: Mapping[str, int]) -> int:
    """Sequences at which a scheduler passes on: 1.25 of the mean with the new one, rounded up."""
    return -(-5 * (sum(loads.values()) + 1) // (4 * max(len(loads), 1)))


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<I", len(encoded)) + encoded
