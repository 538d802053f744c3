"""Who may call the gateway's port, and as whom."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import grpc.aio
from service_kit.credentials import Credentials
from service_kit.identity import Identity

from scheduler_service.errors import ErrorReason, ServiceError
from scheduler_service.gateway.peers import owner_of_peer

GATEWAY = Identity("openai-gateway", "peer")
"""All clients of the gateway together: it does not say which of them sent a request."""
_ROOT = 0

Owner = Callable[[str, int], int | None]
"""owner(peer, port): the user id of the process that connected to the port, or None."""


class GatewayCallers(Credentials):
    """Every caller is the gateway, which sends no token.

    With `own_user_only`, callers must be processes of this service's user, or of root: on a machine with
    several users, others could otherwise go round the tokens that the scheduler's own port demands.
    """

    def __init__(self, *, own_user_only: bool, owner: Owner = owner_of_peer) -> None:
        super().__init__()
        self._own_user_only, self._owner = own_user_only, owner
        self.port = 0
        """The port that the gateway calls; set once it is bound."""

    def identify(self, context: grpc.aio.ServicerContext[Any, Any]) -> Identity:  # noqa: ARG002
        """The gateway."""
        return GATEWAY

    def check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raises ServiceError unless the caller may use this port."""
        if self._own_user_only and self._owner(context.peer(), self.port) not in (os.getuid(), _ROOT):
            raise ServiceError(
                ErrorReason.PERMISSION, "the gateway's port is for processes of the scheduler's user alone"
            )
