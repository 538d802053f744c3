"""Paceline's Python SDK: blocking clients here, asyncio ones in `paceline.aio`.

    with paceline.Client("127.0.0.1:50051") as client:
        for event in client.generate("Once upon a time", max_tokens=64):
            ...

`Client` calls a scheduler, as applications do. `ExecutorClient` calls an executor, step by step.
Errors: `paceline.errors`. The command line: `paceline --help`, with the extra `cli`.
"""

from paceline.channel import Security
from paceline.chat import Message, Tool, ToolCall, ToolCallDelta
from paceline.client import Client
from paceline.errors import PacelineError
from paceline.evaluations import EmbedReply, RankedText, RerankReply, ScoredText, ScoreReply, TextToScore
from paceline.executor_client import ExecutorClient, StepStream
from paceline.generation import Generation
from paceline.requests import Options
from paceline.session import Session
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
    Speculation,
    Started,
    Status,
    TokenLogprobs,
    Usage,
)

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
    "RequestLimits",
    "RerankReply",
    "ScoreReply",
    "ScoredText",
    "Security",
    "Session",
    "Speculation",
    "Started",
    "Status",
    "StepStream",
    "TextToScore",
    "TokenLogprobs",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
]
