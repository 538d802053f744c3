"""gRPC channel and server options, TLS and tokens of all of Paceline's connections.

There are two kinds of link. The *public* link (client to scheduler) keeps messages below 4 MiB, gRPC's
default. The *private* link (scheduler to executor) carries tokenizers and logits, up to 64 MiB. Clients
of both detect a frozen peer within three to four seconds, by keepalive pings. gRPC's own threads answer
pings, so a peer that is busy computing or has nothing to send yet does not count as frozen.

gRPC silently accepts unknown option keys: tests/integration/test_channel.py and test_floods.py check
the effect of each option.
"""

from __future__ import annotations

import enum
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from paceline.names import ROUND_ROBIN, dns_name
from paceline.tls_files import read_certificates, read_key_pair

Options = list[tuple[str, int | str]]
Metadata = tuple[tuple[str, str], ...]

SCHEDULER_ADDRESS = "127.0.0.1:50051"

PUBLIC_MESSAGE_BYTES = 4 << 20
PRIVATE_MESSAGE_BYTES = 64 << 20
METADATA_BYTES = 16 << 10  # of an answer

MAX_CONNECTION_STREAMS = 4096
"""Concurrent calls per connection. The client's gRPC library holds further calls back until others end.

Large enough that a burst reaches the scheduler, which refuses with a reason when its queue is full. Small
enough to bound the memory, about 10 KiB per call, of a connection that opens calls only to reset them, and
of one that never confirms the settings, which gRPC lets open as many calls in all.
"""
MAX_PRIVATE_STREAMS = 512
"""The same of a private connection: a scheduler has fewer than ten."""
MAX_CONNECTIONS = 4096
"""Connections per port, unless the process's limit on file descriptors demands fewer: `max_connections`."""
HANDSHAKE_TIMEOUT_MS = 10_000
MAX_IDLE_MS = 600_000
MAX_AGE_MS = 300_000
"""Age, give or take a tenth, at which a public connection takes no new calls. Its running calls go on.

The client connects anew and resolves its name again, so that schedulers that were added get calls.
"""
MAX_PENDING_CALLS = 16 * MAX_CONNECTION_STREAMS
"""Calls of all connections together that have arrived and not yet reached their handlers."""


class Link(enum.Enum):
    """The kind of a connection: client to scheduler (public) or scheduler to executor (private)."""

    PUBLIC = "public"
    PRIVATE = "private"


@dataclass(frozen=True, slots=True)
class Security:
    """A client's TLS files and token. Without any, the channel is plaintext.

    `ca_file` turns TLS on; `cert_file` and `key_file` add the client's own certificate (mutual TLS).
    `token` is sent as `authorization: Bearer ...` with every call. `server_name` overrides the name that
    the server's certificate is checked against. Raises ValueError for a combination that can't work. The
    files are read when a client is made, which raises OSError for one that can't be used.
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
        """The metadata of every call; empty without a token.

        Plain metadata instead of gRPC call credentials, which require TLS: a token is useful on plaintext
        loopback connections too.
        """
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def credentials(self) -> grpc.ChannelCredentials | None:
        """TLS credentials, or None for plaintext. Raises OSError, like `check_files`."""
        if self.ca_file is None:
            return None
        authorities, chain, key = self._contents(self.ca_file)
        return grpc.ssl_channel_credentials(authorities, key, chain)

    def check_files(self) -> None:
        """Raises OSError, with `filename`, if a file can't be read or is not a certificate or key in PEM."""
        if self.ca_file is not None:
            self._contents(self.ca_file)

    def _contents(self, ca_file: Path) -> tuple[bytes, bytes | None, bytes | None]:
        """The authorities, the client's certificate chain and its key."""
        authorities = read_certificates(ca_file)
        if self.cert_file is None or self.key_file is None:
            return authorities, None, None
        return authorities, *read_key_pair(self.cert_file, self.key_file)


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
        # Above 8 KiB, the default, gRPC would replace some errors, at random, with one of its own.
        ("grpc.max_metadata_size", METADATA_BYTES),
        # A frozen peer keeps its sockets open. keepalive_timeout alone never detects that; with
        # ping_timeout as well the call ends UNAVAILABLE after keepalive_time + ping_timeout.
        ("grpc.keepalive_time_ms", 1_000 if private else 2_000),
        ("grpc.keepalive_timeout_ms", 1_500),
        ("grpc.http2.ping_timeout_ms", 1_500),
        ("grpc.http2.max_pings_without_data", 0),  # unlimited; by default an idle stream sends two pings
        # Reconnect to a restarted server quickly; the default backoff grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),  # timeout of one connection attempt
        ("grpc.max_reconnect_backoff_ms", 500),
        # Do not share connections, and their backoff state, with other channels to the same address.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.primary_user_agent", "paceline"),
    ]


def max_connections() -> int:
    """Connections that one port accepts: MAX_CONNECTIONS, but at most half of the process's descriptors."""
    try:
        import resource
    except ImportError:  # not a Unix system
        return MAX_CONNECTIONS
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(1, descriptors // 2))


def server_options(link: Link) -> Options:
    """Server-side options of a link, for both services."""
    private = link is Link.PRIVATE
    message_bytes = PRIVATE_MESSAGE_BYTES if private else PUBLIC_MESSAGE_BYTES
    aging: Options = [] if private else [("grpc.max_connection_age_ms", MAX_AGE_MS)]
    return [
        *aging,
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.so_reuseport", 0),  # binding a port that another server uses is an error
        # gRPC cancels some of the calls that wait for the event loop above the first number (1,000 by
        # default) and all above the second (3,000), with CANCELLED and no reason. Our handlers give reasons.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.max_concurrent_streams", MAX_PRIVATE_STREAMS if private else MAX_CONNECTION_STREAMS),
        # Connections above the bound are closed at once. A Unix socket is counted apart. Default: no bound.
        ("grpc.max_allowed_incoming_connections", max_connections()),
        # Close connections that complete no handshake (default: two minutes) or have no calls (default:
        # never), so that they do not use up the bound. Clients reconnect by themselves.
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
        # Off, because it also counts streams that are being cleaned up: a client's burst far below the limit
        # would end UNAVAILABLE at random.
        ("grpc.http.overload_protection", 0),
        # Accept the keepalive pings of `channel_options`; the default answers them with GOAWAY.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        # Keep each stream's flow control window at 64 KiB. With probing it grows to megabytes, and with it
        # the memory that the unread messages of a stream take.
        ("grpc.http2.bdp_probe", 0),
        # Detect a dead or frozen client, and end its streams.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
    ]


def open_channel(
    address: str,
    link: Link,
    security: Security = PLAINTEXT,
    credentials: grpc.ChannelCredentials | None = None,
) -> grpc.Channel:
    """A blocking channel. Connecting happens with the first call.

    A public channel to a DNS name spreads calls over all addresses of the name. `credentials`: of `security`,
    where they were made before: no file is read.
    """
    options, credentials = _options(address, link, security), credentials or security.credentials()
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)


def open_aio_channel(
    address: str,
    link: Link,
    security: Security = PLAINTEXT,
    credentials: grpc.ChannelCredentials | None = None,
) -> grpc.aio.Channel:
    """The same for asyncio, bound to the running event loop."""
    options, credentials = _options(address, link, security), credentials or security.credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, credentials, options)


def _options(address: str, link: Link, security: Security) -> Options:
    options = channel_options(link)
    if link is Link.PUBLIC and dns_name(address) is not None:
        options += ROUND_ROBIN
    if security.server_name:
        options.append(("grpc.ssl_target_name_override", security.server_name))
    return options
