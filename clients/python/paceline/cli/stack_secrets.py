"""The tokens that the processes of a stack know each other by: drawn once, handed over through pipes."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field


def draw_token() -> str:
    """256 random bits as text that can travel as metadata."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class StackSecrets:
    """The tokens of one stack. `client` is the clients' own, "": they need none; it opens no executor."""

    client: str = field(default="", repr=False)
    executor: str = field(default_factory=draw_token, repr=False)  # what its executors ask for
    admin: str = field(default_factory=draw_token, repr=False)  # for our own calls to its scheduler

    def executor_line(self) -> bytes:
        """What an executor reads from its standard input first."""
        return _line(auth_token=self.executor)

    def scheduler_line(self) -> bytes:
        """What the scheduler reads."""
        client = {"client_token": self.client} if self.client else {}
        return _line(executor_token=self.executor, admin_token=self.admin, **client)


def _line(**secrets_by_name: str) -> bytes:
    return json.dumps(secrets_by_name).encode() + b"\n"
