"""A refused call is freed when it ends, not by the garbage collector, which would stop the process for it."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
import grpc.aio
import pytest
from service_kit.audit import Audit
from service_kit.credentials import Credentials
from service_kit.gate import Gate
from service_kit.identity import Identity
from service_kit.token_file import Entry

from executor_service.contract.plan import Reason, RequestRefused
from executor_service.rpc.errors import ErrorInterceptor
from scheduler_service.errors import ErrorReason, ServiceError
from scheduler_service.rpc.interceptor import StatusInterceptor
from tests.support.untyped import raw

CALLS = 20
NO_AUDIT = Audit((), lambda method, reason: None)
OPEN = Credentials()
CLOSED = Credentials([Entry.of("secret", Identity("client", "token"))], demanded=True)


async def refuse_in_the_scheduler(request: bytes, context: object) -> NoReturn:
    raise ServiceError(ErrorReason.QUEUE_FULL, "full", retry_after_s=1.0)


async def refuse_in_the_executor(request: bytes, context: object) -> NoReturn:
    raise RequestRefused(Reason.INVALID, "rows: is empty")


async def refuse_unread(context: object) -> NoReturn:
    raise ServiceError(ErrorReason.QUEUE_FULL, "full", retry_after_s=1.0)


REFUSALS = {
    "by the gate": (Gate(CLOSED, NO_AUDIT), refuse_in_the_executor),
    "by the scheduler": (StatusInterceptor(OPEN, NO_AUDIT), refuse_in_the_scheduler),
    "by the scheduler, unread": (StatusInterceptor(OPEN, NO_AUDIT, refuse_unread), refuse_in_the_scheduler),
    "by the executor": (ErrorInterceptor(OPEN, NO_AUDIT), refuse_in_the_executor),
}


@asynccontextmanager
async def server(interceptor: grpc.aio.ServerInterceptor, behaviour: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server of one method, whose calls end as `behaviour` does."""
    server = grpc.aio.server(interceptors=[interceptor])
    handlers: dict[str, Any] = {"Generate": grpc.unary_unary_rpc_method_handler(behaviour)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("paceline.test", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


def uncollected(kind: str) -> int:
    """Unreachable objects of this type that only the garbage collector can free; frees them."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return sum(type(item).__name__ == kind for item in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_refused_call_leaves_nothing_to_the_garbage_collector(refusal: str) -> None:
    async with server(*REFUSALS[refusal]) as channel:
        call = raw(channel).unary_unary("/paceline.test/Generate")
        gc.collect()
        gc.disable()
        try:
            for _ in range(CALLS):
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(b"x")
            assert uncollected("RPCState") == 0  # gRPC's state of a call on the server
        finally:
            gc.enable()
