"""`BackendSettings`: what a backend can be told. Each declares its own; the command line has all of them."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field


class BackendSettings(BaseModel):
    """Base of the declarations. A field's name belongs to one of them, whose backends alone read it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def of(cls, composed: BaseModel) -> Self:
        """This backend's part of settings that are composed of several backends'."""
        return cls(**{name: getattr(composed, name) for name in cls.model_fields})

    def check(self) -> None:
        """Raises ValueError where this backend can't run with its settings."""


class SyntheticModelSettings(BackendSettings):
    """Of a model that is made up."""

    vocab_size: int = Field(
        default=257, ge=1, le=1 << 20, description="ids; 257: bytes and an end (oracle, paged-attention)"
    )
    context_length: int = Field(
        default=32_768, ge=1, le=1 << 24, description="tokens (oracle, paged-attention)"
    )
