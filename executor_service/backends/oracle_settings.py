"""`OracleSettings`: the oracle's model, its clock and its faults. Knows no numpy."""

from __future__ import annotations

from pydantic import Field

from executor_service.backends.settings import SyntheticModelSettings


class OracleSettings(SyntheticModelSettings):
    """The oracle's model, its clock and its faults. Raises ValueError, naming the field."""

    draft_agreement: float = Field(
        default=1.0, ge=0, le=1, description="share of the target's logits; 1: the target (oracle)"
    )
    draft_seed: int = Field(default=0, ge=0, lt=1 << 64, description="which logits agree (oracle)")
    step_ms: float = Field(default=0.0, ge=0, le=600_000, description="a step takes at least this (oracle)")
    token_us: float = Field(default=0.0, ge=0, le=60_000_000, description="and this for each token (oracle)")
    nan_on_token: int | None = Field(
        default=None, ge=0, description="fault: NaN logits behind this id (oracle)"
    )
    exit_on_token: int | None = Field(
        default=None, ge=0, description="fault: die when this id is fed (oracle)"
    )
    exit_after_steps: int | None = Field(default=None, ge=0, description="fault: die after so many (oracle)")
    freeze_after_steps: int | None = Field(
        default=None, ge=0, description="fault: stop after so many (oracle)"
    )
