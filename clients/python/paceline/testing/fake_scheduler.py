"""`FakeScheduler`: a scheduler in this process that answers what a test tells it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import grpc

from paceline import aio
from paceline.channel import Link, server_options
from paceline.client import Client
from paceline.scheduler.v1 import scheduler_pb2_grpc
from paceline.testing.calls import ReceivedCall
from paceline.testing.replies import FakeError, FakeReply, Fault, reply_of
from paceline.testing.rules import ReplyRules
from paceline.testing.servicer import FakeServicer

MAX_CALLS = 64
"""Calls that are answered at once; further ones wait."""

_SHOWN = 80  # characters of a prompt in a message


class FakeScheduler:
    """A real gRPC server on loopback, without a model. Use as a context manager, or `start` and `stop` it.

        with FakeScheduler() as fake, fake.client() as client:
            fake.reply(FakeError("QUEUE_FULL", retry_after_s=0.1), times=1)
            fake.reply("Paris.", to="capital of France")

    It runs on threads of its own, so blocking and asyncio tests use it alike. `calls` are all calls that it
    got, in order. A call for which there is no reply ends INTERNAL and is in `unanswered` as well.
    `servicer` can be added to another server, such as that of pytest-grpc.
    """

    def __init__(self, port: int = 0) -> None:
        """`port` on loopback; 0: any free one, which stays the same when it is started again."""
        self.calls: list[ReceivedCall] = []
        self.unanswered: list[ReceivedCall] = []
        self.servicer = FakeServicer(self._choose, self.calls)
        self._rules = ReplyRules()
        self._port = port
        self._server: grpc.Server | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """host:port. Raises RuntimeError before the first start."""
        if not self._port:
            raise RuntimeError("the FakeScheduler was not started")
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen. Raises RuntimeError if the port is taken, or the scheduler was started before."""
        if self._server is not None:
            raise RuntimeError("the FakeScheduler was started before")
        threads = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="fake-scheduler")
        server = grpc.server(threads, options=server_options(Link.PUBLIC))
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self.servicer, server)
        self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
        server.start()
        self._server = server

    def stop(self) -> None:
        """End all calls and close the port, if it listens."""
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def client(self) -> Client:
        """A new blocking client of it; the caller closes it."""
        return Client(self.address)

    def aio_client(self) -> aio.Client:
        """A new asyncio client of it; the caller closes it. Call this in the event loop."""
        return aio.Client(self.address)

    def reply(
        self,
        reply: str | Sequence[str] | FakeReply | Fault,
        *,
        to: str | None = None,
        times: int | None = None,
    ) -> None:
        """Give this reply to the next calls of Generate and GenerateUnary that no earlier reply answers.

        A string, or a sequence with the text of each delta, is short for a FakeReply of that text; a fault
        alone for one without text. `to`: only to prompts in which this regular expression is found (of a
        chat: in the last message). `times`: to this number of calls; None: to any number. Raises ValueError.
        """
        self._rules.add(reply_of(reply), to, times)

    def forget(self) -> None:
        """Drop all replies; `calls` stay."""
        self._rules.forget()

    def _choose(self, call: ReceivedCall) -> FakeReply:
        reply = self._rules.take(call.prompt, call.request_id)
        if reply is not None:
            return reply
        self.unanswered.append(call)
        shown = call.prompt if len(call.prompt) <= _SHOWN else f"{call.prompt[:_SHOWN]}..."
        return FakeReply(
            fault=FakeError("INTERNAL", f"the FakeScheduler has no reply to {shown!r}, or none left")
        )
