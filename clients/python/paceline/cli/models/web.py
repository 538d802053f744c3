"""A GGUF file from any web server, with the digest that its publisher says."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from paceline.cli.models.directories import ModelFetchError, Progress, copied, file_sha256

_FILE_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*\.gguf", re.ASCII | re.IGNORECASE)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_TIMEOUT_S = 60.0


def fetch_url(url: str, sha256: str, directory: Path, progress: Progress) -> Path:
    """The path of the verified GGUF file in `directory`, downloaded if it is missing.

    A download that was interrupted goes on where it ended. The file gets its name when it has the digest.
    Raises ModelFetchError, OSError.
    """
    _check(url)
    name = unquote(urlsplit(url).path).rpartition("/")[2]
    if not _FILE_NAME.fullmatch(name):
        raise ModelFetchError(f"{url} does not end with the name of a GGUF file")
    digest = sha256.lower().removeprefix("sha256:")
    if not _DIGEST.fullmatch(digest):
        raise ModelFetchError(
            "--sha256 has to be given with a URL: 64 hex digits, from where the file's publisher says them"
        )
    target = directory / name
    if target.is_file():
        if file_sha256(target, progress) == digest:
            return target
        raise ModelFetchError(f"{target} is another file, of another digest: delete it, or rename it")
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / f"{name}.{digest[:16]}.part"
    _download(url, part, progress)
    if file_sha256(part, progress) != digest:
        part.unlink()
        raise ModelFetchError(f"what {url} sent has another SHA-256 than {digest}: it was deleted")
    with part.open("rb") as file:
        if file.read(4) != b"GGUF":
            part.unlink()
            raise ModelFetchError(f"what {url} sent is no GGUF file: it was deleted")
    part.replace(target)
    return target


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Redirects, but not out of TLS."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        _check(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
        raise ModelFetchError(f"{url} is not an https:// address")


def _download(url: str, part: Path, progress: Progress) -> None:
    """Download the rest of `part`."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    opener = urllib.request.build_opener(_SafeRedirects)
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            goes_on = answer.status == http.client.PARTIAL_CONTENT
            start = have if goes_on else 0
            total = start + int(answer.headers.get("Content-Length") or 0)

            def show(what: str, done: int, _: int) -> None:
                progress(what, start + done, total)

            with part.open("ab" if goes_on else "wb") as sink:
                copied(answer, sink, total, show, "Fetching")
            if part.stat().st_size < total:
                raise ModelFetchError(f"{url} ended early: run the command again, which goes on there")
    except urllib.error.HTTPError as error:
        if have and error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # it is whole already
        raise ModelFetchError(f"{url}: {error.code} {error.reason}") from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise ModelFetchError(f"{url} could not be fetched: {reason}") from None
