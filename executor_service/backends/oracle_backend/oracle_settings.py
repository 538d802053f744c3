"""`OracleSettings`: the oracle's model, step time and injected faults. Does not import numpy."""

from __future__ import annotations

from pydantic import Field

from executor_service.backends.settings import SyntheticModelSettings


class OracleSettings(SyntheticModelSettings):
    """The oracle's model, step time and injected faults."""

    draft_agreement: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="share of positions with the target model's logits; 1: the target (oracle)",
    )
    draft_seed: int = Field(
        default=0, ge=0, lt=1 << 64, description="selects the positions that agree with the target (oracle)"
    )
    step_ms: float = Field(
        default=0.0, ge=0, le=600_000, description="minimum time of a step, milliseconds (oracle)"
    )
    token_us: float = Field(
        default=0.0, ge=0, le=60_000_000, description="added time per token, microseconds (oracle)"
    )
    nan_on_token: int | None = Field(
        default=None, ge=0, description="fault: NaN logits once a sequence has this id (oracle)"
    )
    exit_on_token: int | None = Field(
        default=None, ge=0, description="fault: exit when this id is computed (oracle)"
    )
    exit_after_steps: int | None = Field(
        default=None, ge=0, description="fault: exit after this many forwards (oracle)"
    )
    freeze_after_steps: int | None = Field(
        default=None, ge=0, description="fault: SIGSTOP after this many forwards (oracle)"
    )
