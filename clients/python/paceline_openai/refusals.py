"""Refusals in the form of OpenAI's API, and the SDK's errors as such."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType

import grpc
from paceline import errors


@dataclass
class Refusal(Exception):
    """An answer with an error's status. `param`: the field of the request that is the cause, if one is."""

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None
    close: bool = False  # the connection, as the rest of the request is not read

    def body(self) -> bytes:
        """The JSON of OpenAI's API."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that belong to this refusal alone."""
        headers = [(b"connection", b"close")] if self.close else []
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
            headers.append((b"retry-after-ms", b"%d" % max(1, math.ceil(1000 * self.retry_after_s))))
        return headers


def bad(param: str | None, message: str, code: str | None = "invalid_value") -> Refusal:
    """400: a value of the request is the cause."""
    return Refusal(HTTPStatus.BAD_REQUEST, message, code=code, param=param)


_DEFAULT_RETRY_S = 1.0
"""Where a scheduler gives no hint."""
_CLIENT_CLOSED = 499

_BY_CODE: Mapping[grpc.StatusCode, tuple[int, str, str | None]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (HTTPStatus.BAD_REQUEST, "invalid_request_error", "invalid_value"),
    grpc.StatusCode.OUT_OF_RANGE: (HTTPStatus.BAD_REQUEST, "invalid_request_error", "invalid_value"),
    grpc.StatusCode.FAILED_PRECONDITION: (HTTPStatus.CONFLICT, "invalid_request_error", None),
    grpc.StatusCode.ALREADY_EXISTS: (HTTPStatus.CONFLICT, "invalid_request_error", None),
    grpc.StatusCode.UNIMPLEMENTED: (HTTPStatus.BAD_REQUEST, "invalid_request_error", "unsupported_value"),
    grpc.StatusCode.NOT_FOUND: (HTTPStatus.NOT_FOUND, "invalid_request_error", "model_not_found"),
    grpc.StatusCode.UNAUTHENTICATED: (HTTPStatus.UNAUTHORIZED, "invalid_request_error", "invalid_api_key"),
    grpc.StatusCode.PERMISSION_DENIED: (HTTPStatus.FORBIDDEN, "permission_error", "permission_denied"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        HTTPStatus.TOO_MANY_REQUESTS,
        "rate_limit_error",
        "rate_limit_exceeded",
    ),
    grpc.StatusCode.UNAVAILABLE: (HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "service_unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (HTTPStatus.GATEWAY_TIMEOUT, "server_error", "timeout"),
    grpc.StatusCode.CANCELLED: (_CLIENT_CLOSED, "server_error", "cancelled"),
    grpc.StatusCode.ABORTED: (HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "aborted"),
}
"""Status, type and code by the code of gRPC. Any other is 500."""

_PARAMS: Mapping[str, str] = {
    "token_ids": "prompt",
    "text": "prompt",
    "inputs": "prompt",
    "template_arguments": "chat_template_kwargs",
    **dict.fromkeys(("schema", "regex", "grammar", "choices", "structural_tag"), "response_format"),
}
"""Arguments of the SDK that OpenAI's API calls otherwise."""
_PROMPTS = ("prompt", "messages")
_TOO_LONG = re.compile(r"context|at most [\d,]+ fit|has \d+ bytes")
_TOO_LARGE = "message too large"  # of gRPC, before a scheduler has seen it

_FIELD = re.compile(r"(?:messages\.)?([a-z_]+)((?:\.[a-z_]+|\[\d+\])*)(?=[: ])")


def renamed(param: str | None, names: Mapping[str, str]) -> str | None:
    """A field as an endpoint calls it: by `names`, and without its index, which counts otherwise there."""
    head = re.split(r"[.[]", param or "")[0]
    return param if names.get(head, head) == head else names[head]


def from_error(error: errors.PacelineError, names: Mapping[str, str] = MappingProxyType({})) -> Refusal:
    """The refusal for an error of the SDK. `names`: what the endpoint calls fields of other ones."""
    status, kind, code = _BY_CODE.get(error.code, (HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", None))
    retry = None
    if isinstance(error, errors.RetryLater):
        retry = _DEFAULT_RETRY_S if error.retry_after_s is None else error.retry_after_s
    message = error.message
    if status == HTTPStatus.BAD_REQUEST:
        param = "prompt" if message.startswith(_TOO_LARGE) else _param(message)
        if message.startswith(_TOO_LARGE) or (
            param and param.startswith(_PROMPTS) and _TOO_LONG.search(message)
        ):
            code = "context_length_exceeded"
        return Refusal(status, message, kind, code, renamed(param, names))
    if status == HTTPStatus.NOT_FOUND:
        return Refusal(status, message, kind, code, "model")
    if status == HTTPStatus.UNAUTHORIZED:
        message = (
            "the API key is missing or wrong: send the scheduler's token as `Authorization: Bearer TOKEN`"
        )
    return Refusal(status, message, kind, code, None, retry)


def _param(message: str) -> str | None:
    """The field that the message of a scheduler begins with, as OpenAI's API calls it."""
    found = _FIELD.match(message)
    if found is None:
        return None
    name, rest = found[1], found[2]
    if message[found.end()] == " " and not rest and "_" not in name and name not in _PARAMS:
        return None  # a sentence of people, not a field
    return _PARAMS.get(name, name) + rest
