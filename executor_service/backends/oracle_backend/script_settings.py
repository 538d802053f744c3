"""`ScriptSettings`: settings of the oracle that says what a file tells it. Does not import numpy."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from executor_service.backends.oracle_backend.oracle_settings import OracleSettings
from executor_service.backends.settings import BYTE_VOCABULARY


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
