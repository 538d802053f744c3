"""Opens a service's port (plaintext, TLS or mutual TLS), and reads the file of a single token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from paceline.bounded_files import read_bounded
from paceline.channel import Security
from paceline.tls_files import read_certificates, read_key_pair

from service_kit.secrets import check_token

MAX_TOKEN_FILE_BYTES = 8192


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """A service's TLS files. Without any, the port is plaintext.

    With `client_ca_file` every caller must send a certificate of that authority (mutual TLS). Raises
    ValueError for a combination that can't work.
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
        """Open the port; returns its number. Raises RuntimeError if it is in use, OSError for a file."""
        credentials = self._credentials()
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)

    def check_files(self) -> None:
        """Raises OSError, with `filename`, if a file can't be read or is not a certificate or key in PEM."""
        self._credentials()

    def _credentials(self) -> grpc.ServerCredentials | None:
        if self.cert_file is None or self.key_file is None:
            return None
        chain, key = read_key_pair(self.cert_file, self.key_file)
        return grpc.ssl_server_credentials(
            [(key, chain)],
            root_certificates=read_certificates(self.client_ca_file) if self.client_ca_file else None,
            require_client_auth=self.client_ca_file is not None,
        )


def check_tls_files(security: Security | ServerSecurity) -> None:
    """Raises ValueError, which checks of settings report, if one of the TLS files can't be used."""
    try:
        security.check_files()
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from error


def read_token(path: Path | None) -> str:
    """The token in a file; "" if `path` is None. Raises ValueError if the file is unreadable or empty."""
    if path is None:
        return ""
    try:
        token = read_bounded(path, MAX_TOKEN_FILE_BYTES).decode().strip()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ValueError(f"{path}: a token is visible ASCII without spaces") from None
    if not token:
        raise ValueError(f"{path}: the token is empty")
    check_token(str(path), token)
    return token
