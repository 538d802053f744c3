"""The server's certificate: what it shows, and that a new one is shown without a restart."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from paceline.aio import Client
from paceline_openai import Bounds, Gateway, server

from tests.support.openai_door import answer_of


async def answered(port: int, authority: trustme.CA) -> tuple[int, bytes]:
    """The status of /liveness, and the certificate that was shown."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname="localhost"
    )
    writer.write(b"GET /liveness HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    async with asyncio.timeout(30):
        status = answer_of(await reader.read()).status
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(True)
    writer.close()
    return status, shown


async def test_a_new_certificate_is_shown_without_a_restart_and_a_broken_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_CERTIFICATE_POLL_S", 0.01)
    authority, reported = trustme.CA(), asyncio.Event()
    monkeypatch.setattr(server.log, "error", lambda *_, **__: reported.set())
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def issue() -> None:
        issued = authority.issue_cert("localhost")
        issued.private_key_pem.write_to_path(str(key))  # the two do not match for a moment
        issued.cert_chain_pems[0].write_to_path(str(cert))

    async def until(shows: Callable[[bytes], bool]) -> bytes:
        async with asyncio.timeout(30):
            while True:
                status, shown = await answered(port, authority)
                assert status == 200
                if shows(shown):
                    return shown

    issue()
    force = asyncio.Event()
    force.set()
    async with Client("127.0.0.1:9") as client:
        serving = server.Server(Gateway(client), Bounds(), cert, key)
        port = await serving.listen("127.0.0.1", 0)
        try:
            first = await until(lambda _: True)
            issue()
            second = await until(lambda shown: shown != first)
            reported.clear()
            cert.write_text("-----BEGIN CERTIFICATE-----\nnone\n-----END CERTIFICATE-----\n")
            async with asyncio.timeout(30):
                await reported.wait()
            assert (await answered(port, authority))[1] == second
            issue()
            await until(lambda shown: shown not in (first, second))
        finally:
            await serving.stop(force)
