"""How a port is opened: plaintext, TLS, mutual TLS; and the file of one token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from paceline.service.secrets import check_token


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """TLS files. Empty: plaintext for everyone.

    `client_ca_file` demands a certificate from every caller (mutual TLS). Raises ValueError.
    """

    cert_file: Path | None = None
    key_file: Path | None = None
    client_ca_file: Path | None = None

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
    check_token(str(path), token)
    return token
