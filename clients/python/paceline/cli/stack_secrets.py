"""The tokens with which the processes of a stack authenticate to each other, passed on through pipes."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field


def draw_token() -> str:
    """A new random token of 256 bits, in characters that gRPC metadata can carry."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class StackSecrets:
    """The tokens of one stack."""

    client: str = field(default="", repr=False)  # clients' token for the scheduler; "": they need none
    executor: str = field(default_factory=draw_token, repr=False)  # the executors' token
    admin: str = field(default_factory=draw_token, repr=False)  # for this process's calls to the scheduler

    def executor_line(self) -> bytes:
        """The line of secrets for an executor's standard input."""
        return _line(auth_token=self.executor)

    def router_line(self) -> bytes:
        """The line of secrets for the standard input of a router."""
        return _line(**({"client_token": self.client} if self.client else {}))

    def scheduler_line(self) -> bytes:
        """The line of secrets for the scheduler's standard input."""
        client = {"client_token": self.client} if self.client else {}
        return _line(executor_token=self.executor, admin_token=self.admin, **client)


def _line(**secrets_by_name: str) -> bytes:
    return json.dumps(secrets_by_name).encode() + b"\n"
