"""A model from a hub that speaks Hugging Face's protocol, in that hub's own cache on this machine.

huggingface_hub downloads: resumed after an interruption, with its own progress bars, and with the user's
endpoint, proxies and token. What is fetched is chosen before, and verified after: each file has the digest
that the hub lists for it, or it is deleted.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.cli.models.directories import ModelFetchError, hub_cache
from paceline.cli.models.hub_files import HubFile, needed_files

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoSibling

_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+?)"
    r"(?:@(?P<revision>[A-Za-z0-9][\w.-]*))?(?::(?P<quantization>[\w.-]+))?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as its format has it
_CHUNK_BYTES = 1 << 20


class HubName(NamedTuple):
    """What names a model of a hub: `owner/name`, then `@revision` and `:QUANTIZATION` of a GGUF file."""

    repository: str
    revision: str  # a branch, a tag or a commit
    quantization: str  # empty: the repository's safetensors, or its only GGUF file

    @property
    def folder(self) -> Path:
        """The repository's folder in the cache."""
        return hub_cache() / f"models--{self.repository.replace('/', '--')}"


def hub_name(given: str) -> HubName | None:
    """The parts of a hub's name; None if it can't be one."""
    found = _NAME.fullmatch(given)
    if found is None or found["repository"].endswith(".gguf"):
        return None
    return HubName(found["repository"], found["revision"] or "main", found["quantization"] or "")


class HubModel:
    """A model as the hub lists it: what has to be fetched."""

    def __init__(self, name: HubName) -> None:
        """Ask the hub. Raises ModelFetchError."""
        from huggingface_hub import HfApi

        self.name = name
        self.api: HfApi = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="paceline")
        with _told(name.repository, self.api.endpoint):
            info = self.api.model_info(
                name.repository, revision=name.revision, files_metadata=True, timeout=30.0
            )
            self.commit = info.sha or ""
            listed = [_listed(file) for file in info.siblings or ()]
        if not _COMMIT.fullmatch(self.commit):
            raise ModelFetchError(f"{name.repository}: the hub named no commit")
        try:
            self.files = needed_files(listed, name.quantization)
        except ModelFetchError as error:
            raise ModelFetchError(f"{name.repository}: {error}") from None
        for file in self.files:
            if file.size < 0 or not (file.sha256 or file.git_oid):
                raise ModelFetchError(f"{name.repository}: the hub lists no size or no digest of {file.path}")

    @property
    def size_bytes(self) -> int:
        """Of all files to fetch."""
        return sum(file.size for file in self.files)

    @property
    def is_here(self) -> bool:
        """Whether all of its files are in the cache, not verified yet."""
        return all((self._snapshot / file.path).exists() for file in self.files)

    @property
    def _snapshot(self) -> Path:
        return self.name.folder / "snapshots" / self.commit

    def fetch(self) -> Path:
        """The path of the model: a GGUF file, or a directory. Files that are there are only verified.

        The cache's name of the revision follows when all files are there. Raises ModelFetchError, OSError.
        """
        folder, snapshot = self.name.folder, self._snapshot
        missing = sum(file.size for file in self.files if not (snapshot / file.path).exists())
        hub_cache().mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(hub_cache()).free
        if missing > free:
            raise ModelFetchError(
                f"{self.name.repository} takes {missing / 1e9:.1f} GB; {hub_cache()} has {free / 1e9:.1f} GB"
            )
        for file in self.files:
            self._check_tag(file)
            with _told(self.name.repository, self.api.endpoint):
                given = self.api.hf_hub_download(
                    self.name.repository, file.path, revision=self.commit, cache_dir=hub_cache()
                )
            if Path(given) != snapshot / file.path:
                raise ModelFetchError(f"{file.path} was put at {given}, which is not its place in the cache")
            _verify(Path(given), file)
        reference = folder / "refs" / self.name.revision
        reference.parent.mkdir(exist_ok=True)
        reference.write_text(self.commit)
        return snapshot / self.files[-1].path if _is_gguf(self.files[-1]) else snapshot

    def _check_tag(self, file: HubFile) -> None:
        """Refuse a file whose ETag is not the digest that was listed: the cache makes a file name of it."""
        from huggingface_hub import hf_hub_url

        with _told(self.name.repository, self.api.endpoint):
            url = hf_hub_url(
                self.name.repository, file.path, revision=self.commit, endpoint=self.api.endpoint
            )
            tag = self.api.get_hf_file_metadata(url=url).etag
        if tag not in (file.sha256, file.git_oid):
            sent = f"{tag!r:.80}, which is not its digest" if tag else "missing: nothing says what is sent"
            raise ModelFetchError(f"{file.path} was not fetched: the hub's ETag of it is {sent}")


def _listed(file: RepoSibling) -> HubFile:
    size = -1 if file.size is None else file.size
    return HubFile(file.rfilename, size, file.lfs.sha256 if file.lfs else "", file.blob_id or "")


def _is_gguf(file: HubFile) -> bool:
    return file.path.lower().endswith(".gguf")


def _verify(path: Path, file: HubFile) -> None:
    """Check size, digest and, of safetensors, the header's length. A file that fails is deleted: raises
    ModelFetchError."""
    digest = (
        hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    )
    with path.open("rb") as content:
        start = content.read(8)
        content.seek(0)
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    complaint = ""
    if path.stat().st_size != file.size:
        complaint = f"has {path.stat().st_size} bytes, where the hub lists {file.size}"
    elif digest.hexdigest() != (file.sha256 or file.git_oid):
        complaint = f"has the digest {digest.hexdigest()}, where the hub lists {file.sha256 or file.git_oid}"
    elif path.suffix == ".safetensors":
        header = int.from_bytes(start, "little")
        if header > min(_MAX_HEADER_BYTES, file.size - 8):
            complaint = f"is no safetensors file: its header would have {header} bytes"
    if complaint:
        blob, blobs = path.resolve(), path.parents[len(Path(file.path).parts) + 1] / "blobs"
        path.unlink()
        if blob.is_relative_to(blobs.resolve()):  # else the name led out of the cache
            blob.unlink(missing_ok=True)
        raise ModelFetchError(f"{file.path} {complaint}: it was deleted")


@contextmanager
def _told(repository: str, endpoint: str) -> Iterator[None]:
    """Say in one sentence what the hub or the network refused."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise ModelFetchError(
            f"{repository} is gated: accept its terms at {endpoint}/{repository}, then run `hf auth login`,"
            " or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelFetchError(f"{endpoint} has no {repository}, or it is private (set HF_TOKEN)") from None
    except errors.RevisionNotFoundError:
        raise ModelFetchError(f"{repository} has no such revision") from None
    except ModelFetchError:
        raise
    except Exception as error:  # the library's, its HTTP client's and the system's have no common base
        first = next(iter(str(error).splitlines()), "")
        raise ModelFetchError(
            f"{repository} could not be fetched from {endpoint}: {type(error).__name__}: {first[:300]};"
            " HF_ENDPOINT names another hub"
        ) from None
