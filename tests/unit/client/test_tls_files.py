"""A TLS file that can't be used is an error that names the file, before anything connects or listens."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import paceline
import pytest
from cryptography.hazmat.primitives import serialization as pem
from paceline import Security, aio
from paceline.cli.app import app
from paceline.cli.diagnosis import diagnose
from paceline.tls_files import read_key_pair
from service_kit import security as security_module
from service_kit.security import ServerSecurity
from typer.testing import CliRunner

from executor_service.config import ExecutorConfig
from scheduler_service.config import SchedulerSettings

TLS = Path(__file__).parents[2] / "support" / "tls"
CA, CERT, KEY = TLS / "ca.pem", TLS / "client.pem", TLS / "client.key"

MakeBadFile = Callable[[Path], Path]


def missing(directory: Path) -> Path:
    return directory / "missing"


def folder(directory: Path) -> Path:
    return directory


def empty(directory: Path) -> Path:
    path = directory / "empty"
    path.touch()
    return path


def text(directory: Path) -> Path:
    path = directory / "text"
    path.write_text("no certificate, no key\n")
    return path


def binary(directory: Path) -> Path:
    path = directory / "binary"
    path.write_bytes(bytes(range(256)))
    return path


def damaged(directory: Path) -> Path:
    path = directory / "damaged"
    path.write_text(CA.read_text()[:200] + "\n-----END CERTIFICATE-----\n")
    return path


@pytest.fixture(params=[missing, folder, empty, text, binary, damaged])
def bad(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make: MakeBadFile = request.param
    return make(tmp_path)


def uses(bad: Path) -> list[Security]:
    return [Security(bad), Security(CA, bad, KEY), Security(CA, CERT, bad)]


def encrypted_key(directory: Path) -> Path:
    key = pem.load_pem_private_key(KEY.read_bytes(), None)
    path = directory / "encrypted.key"
    path.write_bytes(
        key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"secret"))
    )
    return path


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        found.setblocking(False)
        yield found


def test_the_diagnosis_names_the_file_and_does_not_connect(bad: Path, listener: socket.socket) -> None:
    for security in uses(bad):
        with pytest.raises(OSError) as caught:  # noqa: PT011  # its type depends on the file
            diagnose(f"127.0.0.1:{listener.getsockname()[1]}", security, 0.2)
        assert caught.value.filename == str(bad)
        with pytest.raises(BlockingIOError):
            listener.accept()


async def test_clients_name_the_file(bad: Path) -> None:
    for security in uses(bad):
        for client in (paceline.Client, aio.Client):
            with pytest.raises(OSError) as caught:  # noqa: PT011  # its type depends on the file
                client("127.0.0.1:1", security=security)
            assert caught.value.filename == str(bad)


def test_a_command_names_the_file(bad: Path) -> None:
    for command in ("status", "doctor", "model"):
        result = CliRunner().invoke(app, ["--tls-ca", str(bad), command])
        assert result.exit_code == 2
        assert f"{bad}: " in result.stderr


async def test_a_port_is_not_opened_with_such_a_file(bad: Path) -> None:
    for security in (ServerSecurity(bad, KEY), ServerSecurity(CERT, bad), ServerSecurity(CERT, KEY, bad)):
        with pytest.raises(OSError) as caught:  # noqa: PT011  # its type depends on the file
            security.bind(grpc.aio.server(), "127.0.0.1:0")
        assert caught.value.filename == str(bad)


def test_a_renewed_certificate_that_can_not_be_read_once_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = tmp_path / "cert.pem", tmp_path / "key.pem"
    for path, source in zip(pair, (CERT, KEY), strict=True):
        path.write_bytes(source.read_bytes())
    certificates = security_module._Certificates(ServerSecurity(*pair))
    assert certificates.changed() is None
    pair[0].write_bytes(CERT.read_bytes() + b"\n")
    read, failing = read_key_pair, [True, True]

    def sometimes(*files: Path) -> tuple[bytes, bytes]:
        if failing:
            failing.pop()
            raise OSError(errno.EMFILE, "too many open files", str(files[0]))
        return read(*files)

    monkeypatch.setattr(security_module, "read_key_pair", sometimes)
    assert [certificates.changed() is None for _ in range(4)] == [True, True, False, True]


def test_services_refuse_such_a_setting(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for cert, key, authority in ((bad, KEY, CA), (CERT, bad, CA), (CERT, KEY, bad)):
        files = ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(authority)]
        with pytest.raises(SystemExit, match="2"):
            ExecutorConfig.from_command_line(["--backend", "oracle", *files], "executor")
        assert str(bad) in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        SchedulerSettings.from_command_line(["--executor-tls-ca", str(bad)], "scheduler")
    assert str(bad) in capsys.readouterr().err


@pytest.mark.parametrize("key", [lambda directory: TLS / "server.key", encrypted_key])
def test_a_key_of_another_certificate_or_encrypted_is_named(key: MakeBadFile, tmp_path: Path) -> None:
    path = key(tmp_path)
    with pytest.raises(OSError, match="no unencrypted PEM key of the certificate") as caught:
        Security(CA, CERT, path).check_files()
    assert caught.value.filename == str(path)


def test_good_files_are_taken_whatever_the_comments_in_them(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_text(f"Autorité\n{CA.read_text()}\nZertifizierungsstelle Köln\n{CA.read_text()}")
    assert Security(bundle, CERT, KEY).credentials() is not None
    ServerSecurity(CERT, KEY, bundle).check_files()
