"""A caller's identity, and the changes of a tokens file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
from service_kit.credentials import MAX_ABSENCES, Credentials
from service_kit.identity import LOCAL, MAX_PRIORITY, Identity, peer_name, token_hash
from service_kit.token_file import Entry, read_tokens

A, B = token_hash("a-token"), token_hash("b-token")


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def write(path: Path, text: str) -> Path:
    draft = path.with_suffix(".new")
    draft.write_text(text)
    return draft.replace(path)


class Context:
    def __init__(self, peer: str = "ipv4:10.0.0.1:5", auth: Any = None) -> None:
        self._peer, self._auth = peer, auth or {}

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> Any:
        return self._auth


def caller(credentials: Credentials, metadata: Any = (), context: Any = None) -> Identity | None:
    return credentials.identify(cast(Any, context or Context())) if credentials.admits(metadata) else None


def test_an_entry_is_the_callers_identity_with_all_that_it_says(tmp_path: Path) -> None:
    text = f"- {{name: alice, sha256: {A}, weight: 2.5, max_priority: 7, admin: true}}\n"
    file = write(tmp_path / "tokens", text + f"- {{name: bob, sha256: {B.upper()}}}\n")
    credentials = Credentials(file=file, demanded=True)
    assert caller(credentials, bearer("a-token")) == Identity("alice", "token", 2.5, 7, True)
    assert caller(credentials, bearer("b-token")) == Identity("bob", "token", 1.0, 0, False)
    for unknown in ((), bearer(""), bearer(A), (("authorization", "a-token"),), bearer("a-token ")):
        assert caller(credentials, unknown) is None


def test_a_changed_tokens_file_is_read_again_and_a_malformed_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "tokens", f"- {{name: alice, sha256: {A}}}\n")
    credentials = Credentials(file=file, demanded=True)
    write(file, f"- {{name: bob, sha256: {B}}}\n")
    credentials.refresh()
    assert caller(credentials, bearer("a-token")) is None
    assert caller(credentials, bearer("b-token")) is not None
    for broken in (f"- {{name: bob, sha256: {B}\n", ""):  # the second: truncated, and not yet written
        write(file, broken)
        for _ in range(2 * MAX_ABSENCES):
            credentials.refresh()
        assert caller(credentials, bearer("b-token")) is not None
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 2
    write(file, "[]")
    credentials.refresh()
    assert caller(credentials, bearer("b-token")) is None


def test_tokens_of_a_deleted_file_are_refused_and_those_of_a_file_being_replaced_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"- {{name: alice, sha256: {A}}}\n"
    file = write(tmp_path / "tokens", text)
    own = Entry.of("own", Identity("own", "token", admin=True))
    credentials = Credentials([own], file, demanded=True)
    for _ in range(2):  # replaced: it comes back in time, again and again
        file.unlink()
        for _ in range(MAX_ABSENCES - 1):
            credentials.refresh()
        assert caller(credentials, bearer("a-token")) is not None
        write(file, text)
        credentials.refresh()
    file.unlink()
    for _ in range(MAX_ABSENCES + 2):
        credentials.refresh()
    assert caller(credentials, bearer("a-token")) is None
    assert caller(credentials, bearer("own")) is not None
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 4
    assert said[-1] == "the tokens file is gone: its tokens are refused from now on"
    write(file, text)
    credentials.refresh()
    assert caller(credentials, bearer("a-token")) is not None


def test_a_tokens_file_in_an_unreadable_folder_does_not_count_as_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "tokens", f"- {{name: alice, sha256: {A}}}\n")
    credentials = Credentials(file=file, demanded=True)

    def stat(path: Path) -> None:
        raise PermissionError(path)

    with monkeypatch.context() as context:
        context.setattr("service_kit.credentials.os.stat", stat)
        context.setattr("service_kit.credentials.read_tokens", unreadable)
        for _ in range(2 * MAX_ABSENCES):
            credentials.refresh()
    assert caller(credentials, bearer("a-token")) is not None


def unreadable(path: Path) -> list[Entry]:
    raise ValueError(f"{path}: Permission denied")


def test_a_tokens_file_that_has_not_changed_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "tokens", f"- {{name: alice, sha256: {A}}}\n")
    credentials = Credentials(file=file, demanded=True)
    monkeypatch.setattr("service_kit.credentials.read_tokens", lambda path: pytest.fail("read"))
    credentials.refresh()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense: 1", "expected a list"),
        ("", "expected a list"),
        ("- name: [", "line 1: not YAML"),
        (f"- {{sha256: {A}}}", "entry 1: name: Field required"),
        ("- {name: a, sha256: abc}", "entry 1: sha256: expected the 64 hex digits"),
        ("- {name: a, sha256: my-secret-token}", "entry 1: sha256: expected the 64 hex digits"),
        (f"- {{name: a b, sha256: {A}}}", "entry 1: name: expected 1 to 64 letters"),
        (f"- {{name: a, sha256: {A}, weight: 0}}", "entry 1: weight"),
        (f"- {{name: a, sha256: {A}, weight: .nan}}", "entry 1: weight"),
        (f"- {{name: a, sha256: {A}, weight: .inf}}", "entry 1: weight"),
        (f"- {{name: a, sha256: {A}, max_priority: 2147483648}}", "entry 1: max_priority"),
        (f"- {{name: a, sha256: {A}, admin: 1}}", "entry 1: admin"),
        (f"- {{name: a, sha256: {A}, admn: true}}", "entry 1: admn: no such field"),
        (f"- {{name: a, sha256: {A}}}\n- {{name: a, sha256: {B}}}", "the name a is given twice"),
        (f"- {{name: a, sha256: {A}}}\n- {{name: b, sha256: {A}}}", "a and b have the same token"),
    ],
)
def test_a_mistake_in_the_tokens_file_ends_the_start_without_showing_the_value(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        Credentials(file=write(tmp_path / "tokens", text), demanded=True)
    assert "my-secret-token" not in str(caught.value)


def test_a_tokens_file_beyond_its_limits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than"):
        read_tokens(write(tmp_path / "tokens", "#" * ((4 << 20) + 1)))


def test_the_file_can_not_take_the_name_of_a_token_given_otherwise(tmp_path: Path) -> None:
    file = write(tmp_path / "tokens", f"- {{name: admin, sha256: {A}}}\n")
    with pytest.raises(ValueError, match="the name admin is given twice"):
        Credentials([Entry.of("x", Identity("admin", "token", admin=True))], file)


def test_without_a_token_the_certificates_subject_counts_and_then_the_address() -> None:
    credentials = Credentials(certificates=True)
    subject = {"x509_common_name": [b"worker-7"], "x509_pem_cert": [b"PEM"]}
    named = caller(credentials, (), Context(auth=subject))
    assert named == Identity("cn:worker-7", "certificate", 1.0, 0, False)
    alternative = caller(credentials, (), Context(auth={"x509_subject_alternative_name": [b"host\n"]}))
    assert alternative is not None
    assert alternative.name == "san:host?"
    nameless = caller(credentials, (), Context(auth={"x509_pem_cert": [b"PEM"]}))
    assert nameless is not None
    assert nameless.name.startswith("sha256:")
    assert caller(Credentials(), (), Context(auth=subject)) == Identity("10.0.0.1", "peer", 1.0, 0, False)


def test_callers_of_a_loopback_service_without_credentials_are_administrators() -> None:
    found = caller(Credentials(open_admin=True), (), Context("ipv4:127.0.0.1:9"))
    assert found == Identity(LOCAL, "peer", 1.0, MAX_PRIORITY, True)


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        ("ipv4:10.0.0.1:50123", "10.0.0.1"),
        ("ipv4:127.0.0.1:1", LOCAL),
        ("ipv6:%5B::1%5D:1", LOCAL),
        ("ipv6:[::ffff:10.0.0.1]:1", "10.0.0.1"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:1", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "fe80::/64"),
        ("unix:/run/paceline.sock", LOCAL),
        ("unix-abstract:x", LOCAL),
        ("unknown", "unknown"),
    ],
)
def test_a_peer_is_its_host_without_the_port(peer: str, name: str) -> None:
    assert peer_name(peer) == name


async def test_watching_ends_at_once_without_a_tokens_file() -> None:
    await Credentials().watch()


def test_the_same_name_with_other_content_is_another_file(tmp_path: Path) -> None:
    """Written in place, with the old size and modification time."""
    file = write(tmp_path / "tokens", f"- {{name: a, sha256: {A}}}\n")
    credentials, before = Credentials(file=file, demanded=True), file.stat()
    file.write_text(f"- {{name: a, sha256: {B}}}\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    if file.stat().st_ctime_ns != before.st_ctime_ns:
        credentials.refresh()
        assert caller(credentials, bearer("b-token")) is not None
