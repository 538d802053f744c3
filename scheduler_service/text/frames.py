"""The protocol between the scheduler and its tokenizer processes: frames of a JSON header and raw bytes.

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
"""Threads of a tokenizer process that run jobs: lane 0 small ones, lane 1 large ones and loading."""
LARGE_NICENESS = 15
"""Niceness of lane 1's thread, and of lane 0's once its job has taken long."""
EXIT_MEMORY = 3
"""Exit status of a tokenizer process that has reached its memory limit."""
MEMORY_MIB, CPU_S = 1536, 10.0
"""Default limits of a tokenizer process's memory, and of the CPU time of one job in it."""


def encode_head(header: Mapping[str, object], payload_bytes: int) -> bytes:
    """The bytes of a frame before its payload."""
    head = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    return PREFIX.pack(len(head), payload_bytes) + head


def frame_lengths(prefix: bytes) -> tuple[int, int]:
    """Bytes of header and of payload, read from a frame's first 8 bytes. Raises ValueError above a limit."""
    header, payload = PREFIX.unpack(prefix)
    if header > MAX_HEADER_BYTES or payload > MAX_PAYLOAD_BYTES:
        raise ValueError(f"frame too large: {header} bytes of header, {payload} of payload")
    return header, payload


def decode_header(head: bytes) -> Header:
    """The header. Raises ValueError if it is no JSON object."""
    header = json.loads(head)
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    return header


def pack_ints(values: array[int]) -> bytes:
    """Values as uint32, little-endian; their typecode must be I."""
    if sys.byteorder == "big":
        values = array("I", values)
        values.byteswap()
    return values.tobytes()


def unpack_ints(data: bytes) -> array[int]:
    """Values from uint32, little-endian. Raises ValueError if the length is not a multiple of 4."""
    values = array("I")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
