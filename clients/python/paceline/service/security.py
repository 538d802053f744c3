"""Who may reach a service: TLS, mutual TLS, a token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_KEY = "authorization"
_HEALTH = "/grpc.health.v1.Health/"


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """TLS files and the token that callers must send. Empty: plaintext for everyone.

    `client_ca_file` demands a certificate from every caller (mutual TLS). Raises ValueError.
    """

    cert_file: Path | None = None
    key_file: Path | None = None
    client_ca_file: Path | None = None
    token: str = ""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("--tls-cert and --tls-key go together")
        if self.client_ca_file is not None and self.cert_file is None:
            raise ValueError("--tls-client-ca needs --tls-cert")

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """Open the port and return it. Raises RuntimeError if it is taken, OSError for a file."""
        if self.cert_file is None or self.key_file is None:
            return server.add_insecure_port(address)
        credentials = grpc.ssl_server_credentials(
            [(self.key_file.read_bytes(), self.cert_file.read_bytes())],
            root_certificates=self.client_ca_file.read_bytes() if self.client_ca_file else None,
            require_client_auth=self.client_ca_file is not None,
        )
        return server.add_secure_port(address, credentials)

    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """What has to stand in front of the handlers."""
        return [_TokenCheck(self.token)] if self.token else []


def read_token(path: Path | None) -> str:
    """The token in a file; "" for no file. Raises ValueError if there is none in it."""
    if path is None:
        return ""
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    if not token:
        raise ValueError(f"{path}: the token is empty")
    return token


class _TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without `authorization: Bearer <token>`; health checks need none."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler = await continuation(handler_call_details)
        if handler_call_details.method.startswith(_HEALTH) or self._allows(handler_call_details):
            return handler
        return _refusal(handler)

    def _allows(self, details: grpc.HandlerCallDetails) -> bool:
        metadata = details.invocation_metadata or ()
        given = next((value for key, value in metadata if key == _KEY), "")
        sent = given if isinstance(given, bytes) else given.encode()
        return hmac.compare_digest(sent, self._expected)


async def _refuse(_request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "authorization: the token is missing or wrong")


def _refusal(handler: _Handler | None) -> _Handler:
    """A handler of the same shape as the one refused: gRPC wants the arity of the client's call."""
    if handler is not None and handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(_refuse)
    if handler is not None and handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(_refuse)
    return grpc.unary_unary_rpc_method_handler(_refuse)
