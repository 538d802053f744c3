"""Which callers a service knows, and who the caller of an RPC is."""

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

from paceline.service.identity import MAX_PRIORITY, Identity, certificate_name, peer_name
from paceline.service.logs import Log
from paceline.service.tokens import Entry, by_digest, read_tokens

log = Log(__name__)

POLL_S = 1.0
MAX_ABSENCES = 5
"""Looks in a row at which the tokens file may be missing, as while it is being replaced, before all of its
tokens are refused."""
_KEY = "authorization"
_SCHEME = "Bearer "

_Stat = tuple[int, int, int, int]

_by_token: ContextVar[Identity | None] = ContextVar("the caller of this RPC by its token", default=None)


class Credentials:
    """The tokens of a service and what follows from them.

    `fixed` entries are there for the life of the process, those of `file` follow the file. Tokens are
    demanded from every caller if `demanded`; else who sends none, or an unknown one, is known by
    certificate or address. Such a caller is an administrator with `open_admin`, for a service that only
    its own machine reaches and that knows no credentials at all. Raises ValueError.
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
        self._absences = 0  # looks in a row that found no file
        self._known: dict[bytes, Entry] = by_digest(self._fixed)
        if file is not None:
            with suppress(FileNotFoundError):  # reading it says so
                self._stat = _stat(file)
            self._known = by_digest(self._fixed + read_tokens(file))

    def admits(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        """Whether a call with this metadata may go on. Remembers its identity for the RPC's task."""
        identity = self._find(metadata or ())
        _by_token.set(identity)
        return identity is not None or not self.demanded

    def identify(self, context: grpc.aio.ServicerContext[Any, Any]) -> Identity:
        """Who calls: its token's entry, else its certificate's subject, else its address."""
        if (identity := _by_token.get()) is not None:
            return identity
        if self._certificates and (name := certificate_name(context.auth_context())):
            return Identity(name, "certificate")
        admin = self._open_admin
        return Identity(peer_name(context.peer()), "peer", 1.0, MAX_PRIORITY if admin else 0, admin)

    async def watch(self) -> None:
        """Follow the tokens file until cancelled; at once if there is none."""
        while self._file is not None:
            await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Read the tokens file again if it has changed.

        A broken one changes nothing but the log: what it was to say can't be known. One that was deleted
        says that nobody has a token any more, once it has been missing at MAX_ABSENCES looks in a row.
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
        self._stat = found  # taken before reading: what is written meanwhile is read the next time
        try:
            known = by_digest(self._fixed + read_tokens(self._file))
        except ValueError as error:
            entries = len(self._known) - len(self._fixed)
            log.error(
                "the tokens file is broken; what was in force stays so", entries=entries, detail=str(error)
            )
            return
        self._known = known
        log.info("the tokens file was read again", entries=len(known) - len(self._fixed))

    def _missing(self, file: Path) -> None:
        self._absences += 1
        if self._absences == 1:
            self._stat = None  # whatever comes back is read
            log.error("the tokens file is gone; its tokens are refused unless it comes back", file=str(file))
        if self._absences == MAX_ABSENCES:
            self._known = by_digest(self._fixed)
            log.error("the tokens file is gone: its tokens are refused from now on", file=str(file))

    def _find(self, metadata: Iterable[tuple[str, str | bytes]]) -> Identity | None:
        given = next((value for key, value in metadata if key == _KEY), "")
        text = given.decode(errors="replace") if isinstance(given, bytes) else given
        if not text.startswith(_SCHEME):
            return None
        # The index is by the hash of a hash, under a key of this process: its timing says nothing of a token.
        digest = hashlib.sha256(text.removeprefix(_SCHEME).encode(errors="replace")).digest()
        entry = self._known.get(digest)
        if entry is None or not hmac.compare_digest(entry.digest, digest):
            return None
        return entry.identity


def _stat(path: Path) -> _Stat | None:
    """None: it can't be looked at, which says nothing of its content. Raises FileNotFoundError."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
