"""Reads certificates and keys, and checks that they are usable.

gRPC itself does not tell: a client with a malformed file fails with UNAVAILABLE as if no server listened, and
with an empty CA file trusts gRPC's built-in authorities instead of none. All errors are OSError with
`filename` and `strerror`.
"""

from __future__ import annotations

import errno
import ssl
from pathlib import Path

from paceline.bounded_files import read_bounded


def read_certificates(path: Path) -> bytes:
    """The content of a PEM file with at least one certificate. Raises OSError."""
    content = read_bounded(path)
    text = content.decode("ascii", errors="ignore")  # comments between the certificates may not be ASCII
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:  # ValueError: the text is empty
        raise OSError(errno.EINVAL, "holds no certificate in PEM format", str(path)) from error
    return content


def read_key_pair(certificates: Path, key: Path) -> tuple[bytes, bytes]:
    """The contents of a PEM certificate chain and of the unencrypted PEM key of its first certificate.

    Both are regular files, which are read twice. Raises OSError.
    """
    chain, private_key = read_certificates(certificates), read_bounded(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("ALL:@SECLEVEL=0")  # the length of the key is the peer's decision
    try:
        context.load_cert_chain(certificates, key, password=str)  # "": do not ask for one on the terminal
    except ssl.SSLError as error:
        problem = f"holds no unencrypted PEM key of the certificate in {certificates}"
        raise OSError(errno.EINVAL, problem, str(key)) from error
    return chain, private_key
