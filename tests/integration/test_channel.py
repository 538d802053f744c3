"""What each channel and server option is there for: gRPC accepts any key, so only the effect counts."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme
from paceline import Security, aio, errors
from paceline import channel as module
from paceline.channel import Link, open_aio_channel, server_options

from tests.support.ports import kept_port
from tests.support.processes import executor

ECHO = "/test.Echo/Echo"


class Echo(grpc.GenericRpcHandler):
    """Answers the request's own bytes; b"wait" after as many seconds as follow, b"peer" with the caller."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def echo(request: bytes, context: Any) -> bytes:
            if request.startswith(b"wait"):
                await asyncio.sleep(float(request.removeprefix(b"wait")))
            return context.peer().encode() if request == b"peer" else request

        return grpc.unary_unary_rpc_method_handler(echo)


@asynccontextmanager
async def echo_server(link: Link, port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server(options=server_options(link))
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def echo_method(channel: grpc.aio.Channel) -> Any:
    return channel.unary_unary(ECHO)


async def call(
    channel: grpc.aio.Channel, request: bytes, timeout_s: float = 20.0, wait_for_ready: bool = False
) -> bytes:
    try:
        reply: bytes = await echo_method(channel)(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
    except grpc.RpcError as error:
        raise errors.from_rpc(error) from None
    return reply


async def test_an_old_connection_takes_no_new_calls_and_ends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_AGE_MS", 200)
    async with (
        echo_server(Link.PUBLIC) as port,
        open_aio_channel(f"127.0.0.1:{port}", Link.PUBLIC) as channel,
    ):
        first = await call(channel, b"peer")
        running = asyncio.create_task(call(channel, b"wait1"))
        while await call(channel, b"peer") == first:
            pass
        assert not running.done()
        assert await running == b"wait1"


async def test_an_executor_that_freezes_after_a_quiet_time_is_noticed_within_seconds(tmp_path: Path) -> None:
    process = executor("--backend", "oracle", directory=tmp_path)
    try:
        process.wait_serving()
        async with aio.ExecutorClient(process.address) as client, client.stream() as stream:
            await client.get_status(timeout_s=5)
            await asyncio.sleep(5)  # without max_pings_without_data, pinging ends after two
            process.signal(signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(errors.Unavailable):
                await asyncio.wait_for(stream.recv(), 30)
            assert time.monotonic() - began < 15.0
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("link", Link)
async def test_pings_during_a_long_wait_are_welcome(link: Link) -> None:
    """A server without our options answers the third ping, after three to six seconds, with GOAWAY."""
    async with echo_server(link) as port, open_aio_channel(f"127.0.0.1:{port}", link) as channel:
        assert await call(channel, b"wait12") == b"wait12"


@pytest.mark.slow
@pytest.mark.parametrize("link", Link)
async def test_a_server_that_computes_and_looks_at_nothing_else_is_not_taken_for_frozen(link: Link) -> None:
    """Pings are answered below Python: an event loop that stands still for ten seconds breaks no call."""
    script = (
        "import asyncio, grpc, grpc.aio, time\n"
        "from paceline.channel import Link, server_options\n"
        "class Busy(grpc.GenericRpcHandler):\n"
        "    def service(self, details):\n"
        "        async def busy(request, context):\n"
        "            end = time.monotonic() + 10\n"
        "            while time.monotonic() < end: pass\n"
        "            return request\n"
        "        return grpc.unary_unary_rpc_method_handler(busy)\n"
        "async def main():\n"
        f"    server = grpc.aio.server(options=server_options(Link.{link.name}))\n"
        "    server.add_generic_rpc_handlers((Busy(),))\n"
        "    print(server.add_insecure_port('127.0.0.1:0'), flush=True)\n"
        "    await server.start()\n"
        "    await server.wait_for_termination()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        async with open_aio_channel(f"127.0.0.1:{port}", link) as channel:
            assert await call(channel, b"x", timeout_s=60, wait_for_ready=True) == b"x"
    finally:
        process.kill()
        await process.wait()


HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # and no settings


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """What comes until the other side closes."""
    async with asyncio.timeout(60):
        return await reader.read()


async def test_connections_beyond_the_bound_are_closed_and_those_within_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 2)
    async with (
        echo_server(Link.PUBLIC) as port,
        open_aio_channel(f"127.0.0.1:{port}", Link.PUBLIC) as first,
        open_aio_channel(f"127.0.0.1:{port}", Link.PUBLIC) as second,
    ):
        for channel in (first, second):
            assert await call(channel, b"x") == b"x"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await until_closed(reader) == b""
        async with open_aio_channel(f"127.0.0.1:{port}", Link.PUBLIC) as third:
            with pytest.raises(errors.Unavailable):
                await call(third, b"x")
            assert [await call(channel, b"x") for channel in (first, second)] == [b"x", b"x"]
            await second.close()
            assert await call(third, b"x", 60, wait_for_ready=True) == b"x"
        writer.close()


def test_connections_leave_half_of_the_descriptors_to_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for limits, allowed in (((1024, 4096), 512), ((1 << 20, 1 << 20), 4096), ((-1, -1), 4096)):
        monkeypatch.setattr("resource.getrlimit", lambda _, limits=limits: limits)
        assert module.max_connections() == allowed


@pytest.mark.parametrize("says", [b"", HELLO[:20], HELLO])
async def test_a_connection_that_sends_nothing_is_closed(
    monkeypatch: pytest.MonkeyPatch, says: bytes
) -> None:
    """Not after the handshake's time, and after it not for ever."""
    patched = "MAX_IDLE_MS" if says == HELLO else "HANDSHAKE_TIMEOUT_MS"
    monkeypatch.setattr(module, patched, 200)
    async with echo_server(Link.PUBLIC) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(says)
        await until_closed(reader)
        writer.close()


async def test_a_client_that_was_idle_for_long_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_IDLE_MS", 50)
    async with (
        echo_server(Link.PUBLIC) as port,
        open_aio_channel(f"127.0.0.1:{port}", Link.PUBLIC) as channel,
    ):
        for _ in range(3):
            assert await call(channel, b"wait0.2") == b"wait0.2"  # a call that lasts is not idle
            state = channel.get_state()
            async with asyncio.timeout(60):
                while state is grpc.ChannelConnectivity.READY:
                    await channel.wait_for_state_change(state)
                    state = channel.get_state()


async def test_two_servers_cannot_share_a_port() -> None:
    async with echo_server(Link.PUBLIC) as port:
        with pytest.raises(RuntimeError, match="bind"):
            async with echo_server(Link.PUBLIC, port):
                pass


async def test_large_messages_are_for_the_private_link_alone() -> None:
    large = bytes(5 << 20)
    for link in Link:
        async with echo_server(link) as port, open_aio_channel(f"127.0.0.1:{port}", link) as channel:
            if link is Link.PRIVATE:
                assert await call(channel, large) == large
            else:
                with pytest.raises(errors.InvalidRequest, match="too large"):
                    await call(channel, large)


async def test_a_restarted_server_is_found_within_a_second() -> None:
    """gRPC's own waits between attempts grow with the outage. One of five: a machine may stand still."""
    found_s: list[float] = []
    while not found_s or (found_s[-1] > 1.1 and len(found_s) < 5):
        found_s.append(await _seconds_until_found())
    assert min(found_s) < 1.1


async def _seconds_until_found() -> float:
    async with echo_server(Link.PRIVATE, kept_port()) as port:
        channel = open_aio_channel(f"127.0.0.1:{port}", Link.PRIVATE)
        assert await call(channel, b"1") == b"1"
    with pytest.raises(errors.Unavailable):
        await call(channel, b"2")
    with pytest.raises(errors.DeadlineExceeded):
        await call(channel, b"2", timeout_s=3, wait_for_ready=True)
    async with echo_server(Link.PRIVATE, port), channel:
        began = time.monotonic()
        assert await call(channel, b"3", wait_for_ready=True) == b"3"
        return time.monotonic() - began


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, server.pem, server.key, client.pem, client.key, and other.pem of another authority."""
    directory, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    trustme.CA().cert_pem.write_to_path(str(directory / "other.pem"))
    for name in ("server", "client"):
        pair = authority.issue_cert("127.0.0.1", "localhost")
        pair.cert_chain_pems[0].write_to_path(str(directory / f"{name}.pem"))
        pair.private_key_pem.write_to_path(str(directory / f"{name}.key"))
    return directory


async def test_mutual_tls_and_a_token_let_in_only_who_has_both(tmp_path: Path, certificates: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("secret\n")
    arguments = ["--backend", "oracle", "--auth-token-file", str(token_file)]
    for flag, file in (("cert", "server.pem"), ("key", "server.key"), ("client-ca", "ca.pem")):
        arguments += [f"--tls-{flag}", str(certificates / file)]
    authority, other = certificates / "ca.pem", certificates / "other.pem"
    ours = Security(authority, certificates / "client.pem", certificates / "client.key", token="secret")
    process = executor(*arguments, directory=tmp_path / "executor")
    try:

        async def ask(security: Security) -> int:
            async with aio.ExecutorClient(process.address, security=security) as client:
                return (await client.get_status(timeout_s=10)).epoch  # answered while the model loads, too

        assert await ask(ours)
        with pytest.raises(errors.Unauthenticated):
            await ask(replace(ours, token="wrong"))
        with pytest.raises(errors.Unauthenticated):
            await ask(replace(ours, token=""))
        with pytest.raises(errors.Unavailable):
            await ask(Security(ca_file=authority, token="secret"))
        with pytest.raises(errors.Unavailable):
            await ask(replace(ours, ca_file=other))
        with pytest.raises(errors.Unavailable):
            await ask(Security(token="secret"))
    finally:
        process.kill()


async def test_a_renewed_certificate_is_used_without_a_restart_and_a_broken_one_is_not(
    tmp_path: Path,
) -> None:
    names = [tmp_path / name for name in ("ca.pem", "server.pem", "server.key")]

    def renew() -> Security:
        """Another authority, and a certificate of it; the former authority does not know it."""
        authority = trustme.CA()
        pair = authority.issue_cert("127.0.0.1")
        new = authority.cert_pem, pair.cert_chain_pems[0], pair.private_key_pem
        for path, pem in zip(names, new, strict=True):
            pem.write_to_path(str(path))
        copy = tmp_path / f"{len(list(tmp_path.iterdir()))}.pem"
        copy.write_bytes(names[0].read_bytes())
        return Security(copy)

    first = renew()
    arguments = ["--backend", "oracle", "--tls-cert", str(names[1]), "--tls-key", str(names[2])]
    process = executor(*arguments, directory=tmp_path / "executor")
    try:

        async def epoch(security: Security) -> int:
            async with aio.ExecutorClient(process.address, security=security) as client:
                return (await client.get_status(timeout_s=10)).epoch

        async with aio.ExecutorClient(process.address, security=first) as connected:
            epochs = [(await connected.get_status(timeout_s=10)).epoch, await epoch(first)]
            second = renew()
            epochs.append(await epoch(second))
            with pytest.raises(errors.Unavailable):
                await epoch(first)
            trustme.CA().issue_cert("127.0.0.1").private_key_pem.write_to_path(str(names[2]))
            epochs += [await epoch(second), (await connected.get_status(timeout_s=10)).epoch]
            names[1].unlink()
            epochs.append(await epoch(second))
            epochs.append(await epoch(renew()))
        assert len(set(epochs)) == 1
    finally:
        process.kill()
