"""What the scheduler and its tokenizer processes say to each other: frames of a JSON header and raw bytes.

    uint32 header length | uint32 payload length | header (JSON, UTF-8) | payload      little-endian

Token ids are uint32, little-endian. Nothing is unpickled.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Mapping
from typing import Any, TypeAlias

Header: TypeAlias = dict[str, Any]

PREFIX = struct.Struct("<II")
MAX_HEADER_BYTES = 32 << 20
MAX_PAYLOAD_BYTES = 256 << 20
LANES = 2
"""Of a tokenizer process: 0 for small jobs, 1 for large ones and for loading."""
LARGE_NICENESS = 15
"""Of a lane's thread while its job is large, or has turned out to be."""
EXIT_MEMORY = 3
"""The status of a tokenizer process that has reached its memory limit."""


def encode_head(header: Mapping[str, object], payload_bytes: int) -> bytes:
    """A frame up to its payload, which follows."""
    head = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    return PREFIX.pack(len(head), payload_bytes) + head


def frame_lengths(prefix: bytes) -> tuple[int, int]:
    """Header and payload bytes that follow the first 8 bytes. Raises ValueError for absurd ones."""
    header, payload = PREFIX.unpack(prefix)
    if header > MAX_HEADER_BYTES or payload > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame of {header} + {payload} bytes")
    return header, payload


def decode_header(head: bytes) -> Header:
    """The header. Raises ValueError if it is no JSON object."""
    header = json.loads(head)
    if not isinstance(header, dict):
        raise ValueError("a header that is no object")
    return header


def pack_ints(values: array[int]) -> bytes:
    """uint32, little-endian; `values` has the typecode I."""
    if sys.byteorder == "big":
        values = array("I", values)
        values.byteswap()
    return values.tobytes()


def unpack_ints(data: bytes) -> array[int]:
    """The reverse. Raises ValueError if the length is no multiple of 4."""
    values = array("I")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
