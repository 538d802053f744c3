"""`BackendSettings`: each backend declares its settings; the command line combines all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, Field
from service_kit.plugins import BACKENDS, find

BYTE_VOCABULARY = 257
"""Ids of the byte tokenizer: one for each byte, and the end of sequence."""


class BackendSettings(BaseModel):
    """Base of the declarations. Each field name is declared by one of them only."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def of(cls, composed: BaseModel) -> Self:
        """This backend's settings, taken from an object that combines several backends'."""
        return cls(**{name: getattr(composed, name) for name in cls.model_fields})

    def check(self) -> None:
        """Raises ValueError if the backend can't run with these settings."""


class PluginSettings(BackendSettings):
    """Settings of a backend that an installed package has as an entry point `paceline.backends`."""

    backend: str = Field(default="", description="name of the entry point")
    backend_options: dict[str, str] = Field(
        default_factory=dict, description="options of a plugin's backend, as in width=32 (plugins)"
    )

    def check(self) -> None:
        """Raises ValueError if no installed package has this backend, or two have."""
        find(BACKENDS, self.backend)


class SyntheticModelSettings(BackendSettings):
    """Settings of the synthetic models."""

    vocab_size: int = Field(
        default=BYTE_VOCABULARY,
        ge=1,
        le=1 << 20,
        description="number of ids; 257: bytes and an end id (oracle, paged-attention)",
    )
    context_length: int = Field(
        default=32_768, ge=1, le=1 << 24, description="tokens (oracle, paged-attention)"
    )


class PagedAttentionSettings(SyntheticModelSettings):
    """Settings of the reference model; the shape of its heads is fixed."""


def fingerprint(backend: str, config: Mapping[str, object]) -> bytes:
    """SHA-256 over the backend's name and the settings that affect its logits."""
    text = json.dumps({"backend": backend, "config": dict(config)}, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()
