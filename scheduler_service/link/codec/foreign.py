"""Limits the length of texts from executors, before they reach logs, statuses and replies."""

from __future__ import annotations

MAX_CHARACTERS = 256
"""gRPC sends a status's message in trailing metadata, for which 8 KiB are safe."""


def brief(text: str) -> str:
    """The text, cut to MAX_CHARACTERS characters."""
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
