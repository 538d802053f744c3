"""Finds out which protocol a port speaks, with plain sockets: gRPC's errors do not tell."""

from __future__ import annotations

import enum
import errno
import socket
import ssl
from dataclasses import dataclass

from paceline.channel import Security

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(
    [0, 0, 0, 4, 0, 0, 0, 0, 0]
)  # with an empty SETTINGS frame
_SETTINGS = 4
_TLS_RECORDS = (0x15, 0x16)  # alert, handshake

# X509_V_ERR_* of OpenSSL
_EXPIRED = (9, 10)  # not yet valid, no longer valid
_OTHER_NAME = (62, 64)  # host name, IP address


class Speaks(enum.Enum):
    """The protocol at a port."""

    HTTP2 = "HTTP/2"  # gRPC without TLS
    TLS = "TLS"
    OTHER = "something else"
    NOTHING = "nothing"  # accepts connections and sends no byte
    CLOSES = "closes"  # accepts connections and closes them without a byte


class Trust(enum.Enum):
    """The outcome of a TLS handshake."""

    GOOD = "good"
    UNKNOWN_AUTHORITY = "unknown authority"
    OTHER_NAME = "other name"
    EXPIRED = "expired"
    CLIENT_CERTIFICATE = "client certificate"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Handshake:
    """The outcome of a TLS handshake, and the reason as text."""

    trust: Trust
    detail: str = ""


def connect(address: str, timeout_s: float) -> socket.socket:
    """A connection to "host:port" or "unix:/path". Raises OSError."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        found = socket.socket(socket.AF_UNIX)
        found.settimeout(timeout_s)
        try:
            found.connect(
                "/" + path.lstrip("/") if path.startswith("//") else path
            )  # unix:///path is one too
        except OSError:
            found.close()
            raise
        return found
    host, port = host_and_port(address)
    return socket.create_connection((host, port), timeout_s)


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of "host:port", without the brackets of an IPv6 address. Raises OSError for a bad port."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise OSError(errno.EINVAL, f"{port or 'nothing'} is no port")
    return host.strip("[]"), int(port)


def what_speaks(address: str, timeout_s: float) -> Speaks:
    """Try plaintext HTTP/2, then TLS without verifying certificates. Raises OSError if it can't connect."""
    with connect(address, timeout_s) as plain:
        heard = _greet(plain)
    if heard is Speaks.HTTP2 or heard is Speaks.TLS:
        return heard
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # no data is exchanged
    context.set_alpn_protocols(["h2"])
    try:
        with connect(address, timeout_s) as plain, context.wrap_socket(plain):
            return Speaks.TLS
    except TimeoutError:
        return heard
    except ssl.SSLError as error:
        # Only a TLS server sends an alert.
        return Speaks.TLS if "ALERT" in (error.reason or "") else heard
    except OSError:
        return heard


def shake_hands(address: str, security: Security, timeout_s: float) -> Handshake:
    """Try a TLS handshake as gRPC would do it with these settings. Raises OSError if it can't connect."""
    assert security.ca_file is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # gRPC trusts a server's own certificate too
    context.set_alpn_protocols(["h2"])
    try:
        context.load_verify_locations(security.ca_file)
        if security.cert_file is not None:
            context.load_cert_chain(security.cert_file, security.key_file)
    except ssl.SSLError as error:
        return Handshake(
            Trust.FAILED, f"the files of --tls-ca, --tls-cert and --tls-key: {error.reason or error}"
        )
    name = security.server_name or ("localhost" if address.startswith("unix:") else host_and_port(address)[0])
    try:
        with connect(address, timeout_s) as plain, context.wrap_socket(plain, server_hostname=name) as secure:
            if (
                _greet(secure) is Speaks.HTTP2
            ):  # TLS 1.3 refuses a client's certificate only after the handshake
                return Handshake(Trust.GOOD)
            sent = "this client's" if security.cert_file else "no"
            return Handshake(Trust.CLIENT_CERTIFICATE, f"it ends the connection on {sent} certificate")
    except ssl.SSLCertVerificationError as error:
        return Handshake(_distrust(error.verify_code), error.verify_message)
    except ssl.SSLError as error:
        return Handshake(_refusal(error), error.reason or str(error))


def _greet(connection: socket.socket) -> Speaks:
    """The protocol of the reply to the HTTP/2 preface, which a gRPC server answers with SETTINGS."""
    heard = b""
    try:
        connection.sendall(_PREFACE)
        while len(heard) < 9 and (more := connection.recv(9 - len(heard))):
            heard += more
    except TimeoutError:
        return Speaks.OTHER if heard else Speaks.NOTHING
    except ssl.SSLError:
        raise
    except OSError:  # the peer reset the connection
        return Speaks.OTHER if heard else Speaks.CLOSES
    if len(heard) == 9 and heard[3] == _SETTINGS:
        return Speaks.HTTP2
    if not heard:
        return Speaks.CLOSES
    return Speaks.TLS if heard[0] in _TLS_RECORDS else Speaks.OTHER


def _distrust(code: int) -> Trust:
    if code in _EXPIRED:
        return Trust.EXPIRED
    return Trust.OTHER_NAME if code in _OTHER_NAME else Trust.UNKNOWN_AUTHORITY


def _refusal(error: ssl.SSLError) -> Trust:
    """The reason of a failed handshake: servers send alerts for the client's certificate only."""
    return Trust.CLIENT_CERTIFICATE if "ALERT" in (error.reason or "") else Trust.FAILED
