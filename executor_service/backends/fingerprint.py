"""Fingerprint of a model without weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


def fingerprint(backend: str, config: Mapping[str, object]) -> bytes:
    """SHA-256 over the backend's name and the settings that affect its logits."""
    text = json.dumps({"backend": backend, "config": dict(config)}, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()
