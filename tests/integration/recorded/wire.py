"""Calls as raw bytes, and messages as a client of the frozen v1 reads them: without today's stubs."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

from tests.support.checkout import ROOT
from tests.support.untyped import raw

IMAGE = ROOT / "protos" / "v1.binpb"
FILE = Path(__file__).with_name("v1.json")
EXECUTOR = ("--pages", "512", "--vocab-size", "257")
"""Flags of the executor behind the recordings: its tokens depend on them."""

# Times: one that rounds to 0 is not sent.
TIMES = frozenset(
    (
        "elapsedUs",
        "queueUs",
        "computeUs",
        "uptimeS",
        "queueMs",
        "firstTokenMs",
        "totalMs",
        "elapsedMs",
        "computeS",
        "prefillS",
        "decodeS",
        "stepAgeS",
    )
)
# Of one run, one machine or one version; a client of v1 may rely on their presence alone.
VOLATILE = frozenset(
    (
        "epoch",
        "requestId",
        "version",
        "contractRevision",
        "sessionId",
        "model",
        "vocabulary",
        "modelFingerprint",
        "memoryBytes",
        "tokenizerJson",
        "weightBytes",
    )
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call: whose method, the request's bytes, the replies' bytes and how it ended."""

    service: str  # "executor" or "scheduler"
    method: str  # /package.Service/Method
    request: bytes
    replies: tuple[bytes, ...]
    code: str  # of grpc.StatusCode

    def to_json(self) -> dict[str, Any]:
        """As it lies in the file."""
        replies = [base64.b64encode(reply).decode() for reply in self.replies]
        request = base64.b64encode(self.request).decode()
        return {
            "service": self.service,
            "method": self.method,
            "request": request,
            "replies": replies,
            "code": self.code,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Call:
        """The opposite."""
        replies = tuple(base64.b64decode(reply) for reply in value["replies"])
        return cls(
            value["service"], value["method"], base64.b64decode(value["request"]), replies, value["code"]
        )


def recorded() -> list[Call]:
    """All calls, in their order."""
    return [Call.from_json(one) for one in json.loads(FILE.read_text())]


def send(channel: grpc.Channel, service: str, method: str, request: bytes) -> Call:
    """Make the call; its shape is the frozen image's."""
    shape = method_of(method)
    opened = raw(channel)
    replies: list[bytes] = []
    code = grpc.StatusCode.OK
    try:
        if shape.client_streaming:
            replies.extend(opened.stream_stream(method)(iter([request]), timeout=60))
        elif shape.server_streaming:
            replies.extend(opened.unary_stream(method)(request, timeout=60))
        else:
            replies.append(opened.unary_unary(method)(request, timeout=60))
    except grpc.RpcError as error:
        code = error.code()
    return Call(service, method, request, tuple(replies), code.name)


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    files = descriptor_pb2.FileDescriptorSet.FromString(IMAGE.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


def method_of(method: str) -> Any:
    """The frozen descriptor of a method."""
    service, _, name = method.strip("/").partition("/")
    return _pool().FindServiceByName(service).FindMethodByName(name)


def methods() -> Iterator[str]:
    """All methods of the frozen services."""
    files = descriptor_pb2.FileDescriptorSet.FromString(IMAGE.read_bytes())
    for file in files.file:
        for service in file.service:
            for method in service.method:
                yield f"/{file.package}.{service.name}/{method.name}"


def read(method: str, replies: Sequence[bytes]) -> list[Any]:
    """The replies as a client of v1 sees them; of volatile fields only that they are there, and no times."""
    message = message_factory.GetMessageClass(method_of(method).output_type)
    return [_stable(json_format.MessageToDict(message.FromString(reply))) for reply in replies]


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        parts = ((name, part) for name, part in value.items() if name not in TIMES)
        return {name: "*" if name in VOLATILE else _stable(part) for name, part in parts}
    return [_stable(part) for part in value] if isinstance(value, list) else value
