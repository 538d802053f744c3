"""`pull` of a GGUF file by its URL: only over TLS or loopback, only with the digest that was given."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline.cli.models.directories import ModelFetchError
from paceline.cli.models.web import fetch_url

from tests.support.fake_hub import FakeHub, fake_hub

CONTENT = b"GGUF" + bytes(5000)
DIGEST = hashlib.sha256(CONTENT).hexdigest()
PATH = "/owner/tiny/resolve/main/tiny.Q8_0.gguf"


@pytest.fixture
def web() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        hub.files = {"owner/tiny": {"tiny.Q8_0.gguf": CONTENT}}
        yield hub


def fetch(web: FakeHub, directory: Path, sha256: str = DIGEST) -> Path:
    return fetch_url(web.endpoint + PATH, sha256, directory, lambda what, done, total: None)


def test_a_file_arrives_under_its_own_name_and_once(web: FakeHub, tmp_path: Path) -> None:
    path = fetch(web, tmp_path, f"sha256:{DIGEST.upper()}")
    assert path == tmp_path / "tiny.Q8_0.gguf"
    assert path.read_bytes() == CONTENT
    assert fetch(web, tmp_path) == path
    assert web.asked == [f"GET {PATH}"]


def test_a_download_that_was_cut_goes_on_where_it_ended(web: FakeHub, tmp_path: Path) -> None:
    web.cut = {"tiny.Q8_0.gguf": 1234}
    with pytest.raises(ModelFetchError, match="goes on there"):
        fetch(web, tmp_path)
    assert not list(tmp_path.glob("*.gguf"))
    assert fetch(web, tmp_path).read_bytes() == CONTENT
    assert web.asked[-1] == f"GET {PATH} bytes=1234-"


@pytest.mark.parametrize("sent", [CONTENT[:-1], CONTENT[:-1] + b"?", b""])
def test_content_of_another_digest_is_deleted(web: FakeHub, tmp_path: Path, sent: bytes) -> None:
    web.sent = {"tiny.Q8_0.gguf": sent}
    with pytest.raises(ModelFetchError, match="it was deleted"):
        fetch(web, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_no_gguf_file_is_deleted_though_the_digest_is_right(web: FakeHub, tmp_path: Path) -> None:
    web.sent = {"tiny.Q8_0.gguf": b"pickle"}
    with pytest.raises(ModelFetchError, match="no GGUF file"):
        fetch(web, tmp_path, hashlib.sha256(b"pickle").hexdigest())
    assert not list(tmp_path.iterdir())


def test_a_redirect_that_leaves_tls_is_not_followed(web: FakeHub, tmp_path: Path) -> None:
    web.redirects = {PATH: "http://192.0.2.1/tiny.Q8_0.gguf"}
    with pytest.raises(ModelFetchError, match="not an https:// address"):
        fetch(web, tmp_path)


def test_another_file_of_the_same_name_stays(web: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "tiny.Q8_0.gguf").write_bytes(b"mine")
    with pytest.raises(ModelFetchError, match="another file, of another digest"):
        fetch(web, tmp_path)
    assert (tmp_path / "tiny.Q8_0.gguf").read_bytes() == b"mine"
