"""A scheduler that lies: each Generate call is answered with the lie that its prompt names."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from paceline.channel import Link, server_options
from paceline.scheduler.v1 import scheduler_pb2 as pb

MAX_TOKENS = 4
"""What the steps ask for, and what is announced."""

Answer = Iterator[pb.GenerateResponse]
Lie = Callable[[pb.GenerateRequest, grpc.ServicerContext], Answer]
_END = pb.GenerateResponse(
    finished=pb.Finished(
        reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(prompt_tokens=1, completion_tokens=MAX_TOKENS)
    )
)
_MB = 1 << 20


def _started(request: pb.GenerateRequest) -> pb.GenerateResponse:
    had = sum(len(one.token_ids) for one in request.continuation.completions)
    return pb.GenerateResponse(
        started=pb.Started(
            prompt_tokens=1, max_tokens=MAX_TOKENS, sampling=request.sampling, continued_tokens=had
        )
    )


def _delta(text: str = "x", index: int = 0, **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(index=index, delta=pb.Delta(text=text, token_ids=[1], **fields))


def _whole(*texts: str) -> Answer:
    yield from (_delta(text) for text in texts)
    yield _END


def _messages(*messages: pb.GenerateResponse) -> Lie:
    """A lie: Started, and these messages."""
    return lambda request, context: iter([_started(request), *messages])


def _endless(message: pb.GenerateResponse) -> Lie:
    return lambda request, context: itertools.chain([_started(request)], itertools.repeat(message))


def _silence(context: grpc.ServicerContext) -> None:
    left = threading.Event()
    if context.add_callback(left.set):
        left.wait()


def _hangs(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Answer:
    yield _started(request)
    yield from _whole("a", "b", "c", "d")
    _silence(context)


def _silent(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Answer:
    _silence(context)
    yield from ()


def _lost(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Answer:
    yield _started(request)
    yield _delta()
    context.abort(grpc.StatusCode.UNAVAILABLE, "lost")


def _lost_without_a_token(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Answer:
    yield _started(request)
    context.abort(grpc.StatusCode.UNAVAILABLE, "lost")


def _error(
    code: grpc.StatusCode, message: str, *details: Message, trailers: Sequence[tuple[str, str | bytes]] = ()
) -> Lie:
    """A lie: nothing but this status."""
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    status = status_pb2.Status(code=code.value[0], message=message, details=packed)
    kept = [("grpc-status-details-bin", status.SerializeToString())] if details else []

    def refuse(request: pb.GenerateRequest, context: grpc.ServicerContext) -> NoReturn:
        context.set_trailing_metadata((*kept, *trailers))
        context.abort(code, message)

    return refuse


def _retry(seconds: int) -> error_details_pb2.RetryInfo:
    return error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds))


_FULL, _AWAY = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE
_BROKEN = status_pb2.Status(
    code=grpc.StatusCode.INTERNAL.value[0],
    details=[any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff" * 9)],
)
_CALL = pb.ToolCallDelta(index=4_000_000_000, name="__proto__", arguments="{}")
LIES: Mapping[str, Lie] = {
    "endless bytes": _endless(_delta()),
    "endless megabytes": _endless(_delta(_MB * "x")),
    "text without tokens": _endless(pb.GenerateResponse(delta=pb.Delta(text="x"))),
    "15 MB": lambda request, context: iter([_started(request), _delta(15 * _MB * "x")]),
    "60 MB": lambda request, context: iter([_started(request), _delta(60 * _MB * "x")]),
    "finished twice": _messages(_delta(), _END, _END),
    "a delta after the end": _messages(_delta(), _END, _delta()),
    "index 4e9": _messages(_delta(index=4_000_000_000)),
    "lost after each token": _lost,
    "lost without a token": _lost_without_a_token,
    "away": _error(_AWAY, "away"),
    "hangs after the end": _hangs,
    "silent": _silent,
    "a long error": _error(
        grpc.StatusCode.INTERNAL, 7_000 * "e", trailers=[(f"x-trailer-{i}", 100 * "t") for i in range(20)]
    ),
    "escapes": _messages(*_whole("\x1b]52;c;aGk=\x07", "\x1b[2J", "\x9b1m", "\r")),
    "escapes in an error": _error(grpc.StatusCode.INTERNAL, "\x1b]0;title\x07"),
    "tool call 4e9": _messages(_delta(tool_calls=[_CALL])),
    "tool call 4e9, unnamed": _messages(
        _delta(tool_calls=[pb.ToolCallDelta(index=4_000_000_000, arguments="{")])
    ),
    "started twice": lambda request, context: iter([_started(request), _started(request), _delta(), _END]),
    "no number": _messages(_delta(logprobs=[pb.TokenLogprobs(logprob=float("nan"))])),
    "logprobs of a prompt, endless": _endless(
        pb.GenerateResponse(
            prompt_logprobs=pb.PromptLogprobs(first=1, logprobs=[pb.TokenLogprobs()] * 100_000)
        )
    ),
    "in 1e9 s": _error(_FULL, "full", _retry(1_000_000_000)),
    "in 1e11 s": _error(_FULL, "full", _retry(100_000_000_000)),
    "5 s ago": _error(_FULL, "full", _retry(-5)),
    "away for 1e9 s": _error(_AWAY, "away", _retry(1_000_000_000)),
    "broken details": _error(
        grpc.StatusCode.INTERNAL, "broken", trailers=[("grpc-status-details-bin", 9 * b"\xff")]
    ),
    "broken detail": _error(
        grpc.StatusCode.INTERNAL,
        "broken",
        trailers=[("grpc-status-details-bin", _BROKEN.SerializeToString())],
    ),
}


class Liar(grpc.GenericRpcHandler):
    """Serves the lies."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if not handler_call_details.method.endswith("/Generate"):
            return None

        def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Answer:
            return LIES[request.text](request, context)

        return grpc.unary_stream_rpc_method_handler(
            generate, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString
        )


@contextmanager
def lying() -> Iterator[str]:
    """The address of a liar that serves."""
    options = [*server_options(Link.PUBLIC), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(8), [Liar()], options=options)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield address
    finally:
        server.stop(None).wait()
