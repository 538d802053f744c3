"""Who may reach a service: TLS, mutual TLS, a token, and no plaintext beyond loopback unasked."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio
from paceline.channel import is_loopback

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_KEY = "authorization"
_HEALTH = "/grpc.health.v1.Health/"


class UnsafeAddressError(Exception):
    """Plaintext beyond loopback was not asked for."""


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """TLS files and the token that callers must send. Empty: plaintext for everyone.

    `client_ca_file` demands a certificate from every caller (mutual TLS).
    """

    cert_file: Path | None = None
    key_file: Path | None = None
    client_ca_file: Path | None = None
    token: str = ""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("the TLS certificate and its key go together")
        if self.client_ca_file is not None and self.cert_file is None:
            raise ValueError("a client CA needs the server's own TLS certificate")

    def credentials(self) -> grpc.ServerCredentials | None:
        """TLS credentials, or None for plaintext. Raises OSError if a file can't be read."""
        if self.cert_file is None or self.key_file is None:
            return None
        return grpc.ssl_server_credentials(
            [(self.key_file.read_bytes(), self.cert_file.read_bytes())],
            root_certificates=self.client_ca_file.read_bytes() if self.client_ca_file else None,
            require_client_auth=self.client_ca_file is not None,
        )

    def bind(self, server: grpc.aio.Server, host: str, port: int, *, insecure: bool) -> int:
        """Open the port and return it. Raises UnsafeAddressError, and RuntimeError if it is taken."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        credentials = self.credentials()
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        if not (insecure or is_loopback(address)):
            raise UnsafeAddressError(
                f"{host} can be reached from other machines: set a TLS certificate, or --insecure"
            )
        return server.add_insecure_port(address)

    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """What has to stand in front of the handlers."""
        return [_TokenCheck(self.token)] if self.token else []


class _TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without `authorization: Bearer <token>`; health checks need none."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        if handler_call_details.method.startswith(_HEALTH):
            return await continuation(handler_call_details)
        given = next(
            (value for key, value in handler_call_details.invocation_metadata or () if key == _KEY),
            "",
        )
        sent = given if isinstance(given, bytes) else given.encode()
        if hmac.compare_digest(sent, self._expected):
            return await continuation(handler_call_details)
        return _refusal(await continuation(handler_call_details))


async def _refuse(_request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")


def _refusal(handler: _Handler | None) -> _Handler:
    """A handler of the same shape as the one refused: gRPC wants the arity of the client's call."""
    if handler is not None and handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(_refuse)
    if handler is not None and handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(_refuse)
    return grpc.unary_unary_rpc_method_handler(_refuse)
