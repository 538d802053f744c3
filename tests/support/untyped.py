"""Escapes from types, for tests that send what no type allows or read what must be there."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def raw(channel: object) -> Any:
    """The channel, for calls of plain bytes: grpc's types come from serializers, and here are none."""
    return channel


def present(value: T | None) -> T:
    """The value, which is not None."""
    assert value is not None
    return value
