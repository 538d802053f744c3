"""Authenticates the callers of a service by token, and identifies them by token, certificate or address."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import grpc.aio

from service_kit.identity import MAX_PRIORITY, Identity, certificate_name, peer_name
from service_kit.logs import Log
from service_kit.token_file import Entry, by_digest, read_tokens

log = Log(__name__)

POLL_S = 1.0
MAX_ABSENCES = 5
"""Consecutive polls that must find the tokens file missing before its tokens are refused. A file that is
being replaced may be missing for a moment."""
_KEY = "authorization"
_SCHEME = "Bearer "

_Stat = tuple[int, int, int, int]

_by_token: ContextVar[Identity | None] = ContextVar("the caller of this RPC by its token", default=None)


class Credentials:
    """The tokens that a service accepts, and the identities of its callers.

    `fixed` entries never change; those of `file` follow the file (see `watch`). With `demanded` every caller
    must send an accepted token. Without it, a caller who sends no accepted token is identified by the client
    certificate (with `certificates`) or the address, and has admin rights with `open_admin`, which is for
    loopback services without credentials. Raises ValueError for a malformed file or duplicate entries.
    """

    def __init__(
        self,
        fixed: Sequence[Entry] = (),
        file: Path | None = None,
        *,
        demanded: bool = False,
        certificates: bool = False,
        open_admin: bool = False,
    ) -> None:
        self._fixed, self._file = list(fixed), file
        self.demanded, self._certificates, self._open_admin = demanded, certificates, open_admin
        self._stat: _Stat | None = None
        self._absences = 0  # consecutive polls that found no file
        self._accepted: dict[bytes, Entry] = by_digest(self._fixed)
        if file is not None:
            with suppress(FileNotFoundError):  # read_tokens raises ValueError for a missing file
                self._stat = _stat(file)
            self._accepted = by_digest(self._fixed + read_tokens(file))

    def admits(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        """Whether a call with this metadata may proceed. Stores the caller for `identify` in this task."""
        identity = self._find(metadata or ())
        _by_token.set(identity)
        return identity is not None or not self.demanded

    def identify(self, context: grpc.aio.ServicerContext[Any, Any]) -> Identity:
        """The caller's identity: from its token, else from its certificate, else from its address."""
        if (identity := _by_token.get()) is not None:
            return identity
        if self._certificates and (name := certificate_name(context.auth_context())):
            return Identity(name, "certificate")
        admin = self._open_admin
        return Identity(peer_name(context.peer()), "peer", 1.0, MAX_PRIORITY if admin else 0, admin)

    async def watch(self) -> None:
        """Call `refresh` every POLL_S seconds until cancelled. Returns at once if there is no tokens file."""
        while self._file is not None:
            await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Read the tokens file again if it has changed.

        If the file is malformed, the entries read before stay in force, and an error is logged. If it is
        missing at MAX_ABSENCES consecutive calls, its entries are dropped.
        """
        if self._file is None:
            return
        try:
            found = _stat(self._file)
        except FileNotFoundError:
            self._missing(self._file)
            return
        self._absences = 0
        if found == self._stat:
            return
        self._stat = found  # taken before reading, so that the next call sees a write during the reading
        try:
            accepted = by_digest(self._fixed + read_tokens(self._file))
        except ValueError as error:
            entries = len(self._accepted) - len(self._fixed)
            log.error(
                "the tokens file is broken; what was in force stays so", entries=entries, detail=str(error)
            )
            return
        self._accepted = accepted
        log.info("the tokens file was read again", entries=len(accepted) - len(self._fixed))

    def _missing(self, file: Path) -> None:
        """Count that the tokens file is missing; at MAX_ABSENCES times in a row, drop its entries."""
        self._absences += 1
        if self._absences == 1:
            self._stat = None  # so that a new file is read even if its stat equals the old one's
            log.error("the tokens file is gone; its tokens are refused unless it comes back", file=str(file))
        if self._absences == MAX_ABSENCES:
            self._accepted = by_digest(self._fixed)
            log.error("the tokens file is gone: its tokens are refused from now on", file=str(file))

    def _find(self, metadata: Iterable[tuple[str, str | bytes]]) -> Identity | None:
        given = next((value for key, value in metadata if key == _KEY), "")
        text = given.decode(errors="replace") if isinstance(given, bytes) else given
        if not text.startswith(_SCHEME):
            return None
        # Tokens are looked up by their SHA-256, and Python hashes that with a random key of the process: the
        # time of the lookup tells nothing about a token.
        digest = hashlib.sha256(text.removeprefix(_SCHEME).encode(errors="replace")).digest()
        entry = self._accepted.get(digest)
        if entry is None or not hmac.compare_digest(entry.digest, digest):
            return None
        return entry.identity


def _stat(path: Path) -> _Stat | None:
    """Values that change when the file does; None if they can't be read. Raises FileNotFoundError."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
