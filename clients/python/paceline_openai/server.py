"""Serves an ASGI application on a port that several processes may share, until it is asked to stop."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import uvicorn
from paceline.bounded_files import ChangedFiles
from service_kit.logs import Log
from uvicorn.server import ServerState

from paceline_openai.protocol import bounded
from paceline_openai.settings import Bounds

log = Log(__name__)

_BACKLOG = 1024
_HANDSHAKE_S = 10.0
_CERTIFICATE_POLL_S = 10.0
_ENDING_S = 1.0


class Server:
    """A server of one process. `cert` and `key`: files; None: plaintext."""

    def __init__(self, app: Any, bounds: Bounds, cert: Path | None = None, key: Path | None = None) -> None:
        self._config = uvicorn.Config(
            app,
            http=bounded(bounds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(bounds.idle_timeout_s),
        )
        self._config.load()
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        self._state = ServerState()
        self._files = (cert, key) if cert and key else None
        self._tls = _tls(cert, key) if cert and key else None
        self._servers: list[asyncio.Server] = []
        self._watching: asyncio.Task[None] | None = None

    async def listen(self, host: str, port: int) -> int:
        """Open the port; returns its number. Raises OSError."""
        listener = _socket(host, port)
        tls = {"ssl": self._tls, "ssl_handshake_timeout": _HANDSHAKE_S} if self._tls else {}
        self._servers.append(await self._serve(sock=listener, **tls))
        if self._files is not None:
            self._watching = asyncio.create_task(self._renew(*self._files))
        return int(listener.getsockname()[1])

    async def listen_locally(self, path: Path) -> None:
        """Open a Unix socket that this user alone may open, without TLS. Raises OSError."""
        self._servers.append(await self._serve(sock=_local_socket(path)))

    async def stop(self, force: asyncio.Event) -> None:
        """Take no more connections, and let running requests end, or cancel them when `force` is set."""
        if self._watching is not None:
            self._watching.cancel()
        for server in self._servers:
            server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        forced = asyncio.create_task(force.wait())
        while self._state.tasks and not forced.done():
            await asyncio.wait({forced, *self._state.tasks}, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        for connection in list(self._state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_ENDING_S)

    async def _serve(self, **where: Any) -> asyncio.Server:
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            kind: Any = self._config.http_protocol_class
            made: asyncio.Protocol = kind(
                config=self._config, server_state=self._state, app_state={}, _loop=loop
            )
            return made

        return await loop.create_server(protocol, backlog=_BACKLOG, **where)

    async def _renew(self, cert: Path, key: Path) -> None:
        """Read the files again when they have changed; new connections get what they have then."""
        assert self._tls is not None
        files = ChangedFiles(cert, key)
        while True:
            await asyncio.sleep(_CERTIFICATE_POLL_S)
            found = files.look()
            if found is None or None in found:
                continue
            try:
                _tls(cert, key)  # a context that is in use would be left half changed
                self._tls.load_cert_chain(cert, key)
            except (OSError, ssl.SSLError) as error:
                if files.fails(found):
                    log.error("the certificate is broken; the one before is still used", detail=str(error))
                continue
            files.take(found)
            log.info("the certificate was read again", file=str(cert))


def _tls(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(cert, key, password=str)  # "": do not ask on the terminal
    return context


def _socket(host: str, port: int) -> socket.socket:
    """A socket on the port, which other processes of this user's gateway may share. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _local_socket(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o600)
    return listener
