"""How Paceline's processes talk: channel and server options, TLS and tokens, in one place.

Two kinds of link. The *public* one (client to scheduler) keeps messages below 4 MiB, gRPC's own
default. The *private* one (scheduler to executor) carries tokenizers and logits. Both notice a frozen
peer within three to four seconds: pings are answered by gRPC's own threads, so that a peer that only
computes, or has nothing to say yet, is not taken for frozen.

gRPC accepts unknown option keys in silence; what each of these does is checked by
tests/integration/test_channel.py and test_floods.py.
"""

from __future__ import annotations

import enum
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

Options = list[tuple[str, int | str]]
Metadata = tuple[tuple[str, str], ...]

SCHEDULER_ADDRESS = "127.0.0.1:50051"

PUBLIC_MESSAGE_BYTES = 4 << 20
PRIVATE_MESSAGE_BYTES = 64 << 20

MAX_CONNECTION_STREAMS = 4096
"""Calls of one connection that a server takes at once; its client keeps further ones until others end.

Far above what a burst needs, so that a full queue is refused by name; and what one connection that opens
calls only to reset them can make a server hold, about 10 KiB each.
"""
MAX_CONNECTIONS = 4096
"""Of one port, where the process may have as many descriptors and as many again."""
HANDSHAKE_TIMEOUT_MS = 10_000
MAX_IDLE_MS = 600_000
MAX_PENDING_CALLS = 16 * MAX_CONNECTION_STREAMS
"""Calls of all connections that have arrived and not reached their handlers."""


class Link(enum.Enum):
    """Which of the two links a channel is."""

    PUBLIC = "public"
    PRIVATE = "private"


@dataclass(frozen=True, slots=True)
class Security:
    """TLS files and a token. Empty: plaintext, which the services accept on loopback only.

    `ca_file` alone makes a TLS channel; `cert_file` and `key_file` add the client's own
    certificate (mutual TLS). `token` is sent as `authorization: Bearer ...` with every call.
    `server_name` overrides the name that the server's certificate is checked against.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    token: str = ""
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        if self.cert_file is not None and self.ca_file is None:
            raise ValueError("cert_file needs ca_file, the authority of the server's certificate")
        if not self.token.isascii() or any(c.isspace() for c in self.token):
            raise ValueError("token must be ASCII without spaces")

    @property
    def metadata(self) -> Metadata:
        """What every call sends along; empty without a token.

        Plain metadata, not call credentials: those need TLS, and a token is useful on loopback too.
        """
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def credentials(self) -> grpc.ChannelCredentials | None:
        """TLS credentials, or None for plaintext. Raises OSError if a file can't be read."""
        if self.ca_file is None:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=self.ca_file.read_bytes(),
            private_key=self.key_file.read_bytes() if self.key_file else None,
            certificate_chain=self.cert_file.read_bytes() if self.cert_file else None,
        )


PLAINTEXT = Security()


def is_loopback(address: str) -> bool:
    """Whether `address` ("host:port" or "unix:path") can't be reached from another machine."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rsplit(":", 1)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def channel_options(link: Link) -> Options:
    """Client-side options of a link."""
    private = link is Link.PRIVATE
    message_bytes = PRIVATE_MESSAGE_BYTES if private else PUBLIC_MESSAGE_BYTES
    return [
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_receive_message_length", message_bytes),
        # A frozen peer keeps its sockets open. keepalive_timeout alone never notices it; with
        # ping_timeout set as well the call ends UNAVAILABLE after time + timeout.
        ("grpc.keepalive_time_ms", 1_000 if private else 2_000),
        ("grpc.keepalive_timeout_ms", 1_500),
        ("grpc.http2.ping_timeout_ms", 1_500),
        ("grpc.http2.max_pings_without_data", 0),  # any number; the default is two, then silence
        # A restarted server is found at once; the default waits up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),  # how long one attempt may take
        ("grpc.max_reconnect_backoff_ms", 500),
        # A new channel starts without the connection state of an older one to the same address.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.primary_user_agent", "paceline"),
    ]


def max_connections() -> int:
    """Of one port: half of the descriptors that this process may have; the rest is for all else."""
    try:
        import resource
    except ImportError:  # not everywhere
        return MAX_CONNECTIONS
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(1, descriptors // 2))


def server_options(link: Link) -> Options:
    """Server-side options of a link, for both services."""
    message_bytes = PRIVATE_MESSAGE_BYTES if link is Link.PRIVATE else PUBLIC_MESSAGE_BYTES
    return [
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a silent twin
        # Of calls that wait for the event loop gRPC cancels some above the first number (1,000 by default),
        # and all above the second (3,000): anybody's, with a bare CANCELLED. Handlers refuse with a reason.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.max_concurrent_streams", MAX_CONNECTION_STREAMS),
        # Further connections are closed at once; a Unix socket counts for itself. The default is no bound.
        ("grpc.max_allowed_incoming_connections", max_connections()),
        # Who connects and says nothing, and who has no call for long, leaves its place to others: clients
        # connect again by themselves. By default the first has two minutes, the second for ever.
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
        # Counts streams that are being cleaned up, and refuses at random far below the limit: a burst of an
        # honest client ends UNAVAILABLE then.
        ("grpc.http.overload_protection", 0),
        # Welcome the keepalive pings of `channel_options`; the default answers them with GOAWAY.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        # What nobody reads is not taken from the network either: 64 KiB of a stream. Else the window grows
        # to megabytes by what the connection could carry, and so does the memory of each unread message.
        ("grpc.http2.bdp_probe", 0),
        # A dead or frozen client is noticed, and its streams end.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
    ]


def open_channel(address: str, link: Link, security: Security = PLAINTEXT) -> grpc.Channel:
    """A blocking channel. Connecting happens with the first call."""
    options, credentials = _options(link, security), security.credentials()
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)


def open_aio_channel(address: str, link: Link, security: Security = PLAINTEXT) -> grpc.aio.Channel:
    """An asyncio channel, bound to the running event loop."""
    options, credentials = _options(link, security), security.credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, credentials, options)


def _options(link: Link, security: Security) -> Options:
    options = channel_options(link)
    if security.server_name:
        options.append(("grpc.ssl_target_name_override", security.server_name))
    return options
