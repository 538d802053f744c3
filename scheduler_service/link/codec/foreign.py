"""Text that an executor wrote, on its way into logs, statuses and replies."""

from __future__ import annotations

MAX_CHARACTERS = 256
"""gRPC carries a status' message in its trailing metadata, of which 8 KiB are safe."""


def brief(text: str) -> str:
    """The text, cut to MAX_CHARACTERS."""
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
