"""Settings of the oracle, and of the oracle that says what a file tells it. Does not import numpy."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from executor_service.backends.settings import BYTE_VOCABULARY, SyntheticModelSettings


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


class ScriptSettings(OracleSettings):
    """The oracle's settings, and the file of answers."""

    script: Path | None = Field(
        default=None, description="JSON lines that tell which text follows which prompt (script)"
    )

    def check(self) -> None:
        """Raises ValueError for settings with which a script can't be followed."""
        if self.script is None:
            raise ValueError("--backend script needs --script: a file of JSON lines")
        if self.vocab_size < BYTE_VOCABULARY:
            raise ValueError(
                f"--backend script needs --vocab-size {BYTE_VOCABULARY} or more: one id for each byte"
            )
        if self.draft_agreement < 1.0:
            raise ValueError("--draft-agreement is for --backend oracle: a script has no other text to draft")
