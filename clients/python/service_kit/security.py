"""Opens a service's port (plaintext, TLS or mutual TLS), and reads the file of a single token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from paceline.bounded_files import ChangedFiles, read_bounded
from paceline.channel import Security
from paceline.tls_files import read_certificates, read_key_pair

from service_kit.logs import Log
from service_kit.secrets import check_token

log = Log(__name__)

MAX_TOKEN_FILE_BYTES = 8192


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """A service's TLS files. Without any, the port is plaintext.

    With `client_ca_file` every caller must send a certificate of that authority (mutual TLS). Files that
    change are read again: new connections get what they have then. Raises ValueError for a combination that
    can't work.
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
        if self.cert_file is None:
            return server.add_insecure_port(address)
        certificates = _Certificates(self)
        credentials = grpc.dynamic_ssl_server_credentials(
            certificates.read(),
            certificates.changed,  # type: ignore[arg-type]  # None, which the stubs lack, is no change
            require_client_authentication=self.client_ca_file is not None,
        )
        return server.add_secure_port(address, credentials)

    def check_files(self) -> None:
        """Raises OSError, with `filename`, if a file can't be read or is not a certificate or key in PEM."""
        if self.cert_file is not None:
            _Certificates(self).read()


class _Certificates:
    """The files of a port. gRPC calls `changed` from its own threads, before each handshake."""

    def __init__(self, security: ServerSecurity) -> None:
        assert security.cert_file is not None
        assert security.key_file is not None
        self._pair, self._authority = (security.cert_file, security.key_file), security.client_ca_file
        self._files = ChangedFiles(*self._pair, *([self._authority] if self._authority else []))

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Raises OSError, with `filename`."""
        chain, key = read_key_pair(*self._pair)
        authority = read_certificates(self._authority) if self._authority else None
        return grpc.ssl_server_certificate_configuration([(key, chain)], authority)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What the files have now, once they have changed. A pair that does not fit is not taken."""
        if (found := self._files.look()) is None:
            return None
        try:
            read = self.read()
        except OSError as error:
            if self._files.fails(found):
                detail = f"{error.filename}: {error.strerror}"
                log.error("the certificate is broken; the one before is still used", detail=detail)
            return None
        self._files.take(found)
        log.info("the certificate was read again", file=str(self._pair[0]))
        return read


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
