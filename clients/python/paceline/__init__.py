"""Paceline's Python SDK: blocking clients here, asyncio ones in `paceline.aio`.

    with paceline.Client("127.0.0.1:50051") as client:
        for event in client.generate("Once upon a time", max_tokens=64):
            ...

`Client` calls a scheduler, as applications do. `ExecutorClient` calls an executor, step by step.
Errors: `paceline.errors`. The command line: `paceline --help`, with the extra `cli`.

A name's module is imported when the name is first used: services read their logs and settings from this
package too, and need neither gRPC nor protobuf for those.

gRPC prints its errors alone, unless GRPC_VERBOSITY is set. By itself it prints a line on stderr whenever a
connected server stops, as services do in a rolling restart, in the middle of what a program shows.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC reads it once, when it is imported

if TYPE_CHECKING:
    from paceline import aio, errors
    from paceline.channel import Security
    from paceline.chat import Message, Tool, ToolCall, ToolCallDelta, ToolChoice
    from paceline.client import Client
    from paceline.errors import PacelineError
    from paceline.evaluations import EmbedReply, RankedText, RerankReply, ScoredText, ScoreReply, TextToScore
    from paceline.executor_client import ExecutorClient, StepStream
    from paceline.generation import Generation
    from paceline.requests import Options
    from paceline.session import Session
    from paceline.steps import RequestEvent, Step
    from paceline.tracing import stop_tracing_calls, trace_calls
    from paceline.types import (
        Aborted,
        AdapterInfo,
        Caller,
        Completion,
        Delta,
        Drafter,
        EmbeddingInfo,
        Event,
        ExecutorStatus,
        Finished,
        FinishReason,
        ModelInfo,
        RequestLimits,
        RequestWait,
        Speculation,
        Started,
        Status,
        TokenLogprobs,
        Usage,
        Waits,
    )

    __version__: str

__all__ = [
    "Aborted",
    "AdapterInfo",
    "Caller",
    "Client",
    "Completion",
    "Delta",
    "Drafter",
    "EmbedReply",
    "EmbeddingInfo",
    "Event",
    "ExecutorClient",
    "ExecutorStatus",
    "FinishReason",
    "Finished",
    "Generation",
    "Message",
    "ModelInfo",
    "Options",
    "PacelineError",
    "RankedText",
    "RequestEvent",
    "RequestLimits",
    "RequestWait",
    "RerankReply",
    "ScoreReply",
    "ScoredText",
    "Security",
    "Session",
    "Speculation",
    "Started",
    "Status",
    "Step",
    "StepStream",
    "TextToScore",
    "TokenLogprobs",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "Usage",
    "Waits",
    "aio",
    "errors",
    "stop_tracing_calls",
    "trace_calls",
]

_MODULES = {
    "aio": "",
    "channel": "Security",
    "chat": "Message Tool ToolCall ToolCallDelta ToolChoice",
    "client": "Client",
    "errors": "PacelineError",
    "evaluations": "EmbedReply RankedText RerankReply ScoreReply ScoredText TextToScore",
    "executor_client": "ExecutorClient StepStream",
    "generation": "Generation",
    "requests": "Options",
    "session": "Session",
    "steps": "RequestEvent Step",
    "tracing": "stop_tracing_calls trace_calls",
    "types": "Aborted AdapterInfo Caller Completion Delta Drafter EmbeddingInfo Event ExecutorStatus"
    " FinishReason Finished ModelInfo RequestLimits RequestWait Speculation Started Status TokenLogprobs"
    " Usage Waits",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

if not TYPE_CHECKING:  # a checker that saw it would take every name for one of this package

    def __getattr__(name: str) -> object:
        if name == "__version__":
            metadata = import_module("importlib.metadata")
            try:
                return metadata.version(__name__)
            except metadata.PackageNotFoundError as error:  # a checkout that is not installed
                raise AttributeError(str(error)) from None
        if name not in _MODULE_OF and name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"{__name__}.{_MODULE_OF.get(name, name)}")
        value = module if name in _MODULES else getattr(module, name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULE_OF, *_MODULES})
