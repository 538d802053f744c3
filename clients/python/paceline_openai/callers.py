"""Who calls: a key is a token of the schedulers, which are asked about it before a body is read."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

import grpc
from paceline import ModelInfo, errors
from paceline.aio import Client
from paceline.failover import MODEL_KEY

from paceline_openai.refusals import Refusal, from_error

KEPT_S = 1.0
"""For so long an answer about a key is not asked for again."""
_NOT_THERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_MAX_KEPT = 4096
_MAX_ASKED = 256
"""Keys that are being asked about at once; callers with further ones are refused."""
_MAX_WAITING = 1024
"""Requests that wait for answers about keys: clients that have left meanwhile are not noticed."""
_PATIENCE_S, _TIMEOUT_S = 1.0, 5.0
"""For an answer of the first model, after which another one is asked if there is any; and for each other."""
_MOST_SILENT = 3
"""Schedulers of the first model that are asked in turn, before it counts as silent."""
_SILENT_S = 5.0
"""Seconds for which a first model that has not answered is not asked again: a frozen one is reported as
serving until somebody notices."""
_AGAIN_S = 0.2
"""Between two questions to schedulers that are not there, for the client's `failover_timeout_s` at most."""
_SCHEME = "bearer "
_MAX_KEY = 4096
"""Characters. Longer metadata would be refused by gRPC, as if the scheduler were busy."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller whom the schedulers know: its key, and what they tell it."""

    token: str
    digest: bytes  # SHA-256 of the key: whose share of budgets a request takes
    info: ModelInfo
    model: str  # whose `info` that is; "": of the one that calls mean which name none

    @property
    def name(self) -> str:
        """Its identity at the schedulers."""
        return self.info.caller.name if self.info.caller else ""

    @property
    def admin(self) -> bool:
        """Whether it is an administrator."""
        return bool(self.info.caller and self.info.caller.admin)


class Callers:
    """Asks the schedulers who has a key, by GetModelInfo, and keeps each answer for KEPT_S.

    Of several models at an address the first one is asked, and while it isn't there, another one that serves.
    Of several schedulers of a model, one that takes calls and answers none keeps nobody from the others.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: OrderedDict[bytes, tuple[float, asyncio.Task[tuple[ModelInfo, str]]]] = OrderedDict()
        self._asked = self._waiting = 0
        self._is_away = False  # the first model, when it was asked last
        self._silent_until = 0.0  # until then it is not asked, even if it is reported as serving

    async def identify(self, authorization: str) -> Caller:
        """The caller of a request with this header. Raises Refusal (401, 403, 503)."""
        token = token_of(authorization)
        digest = hashlib.sha256(token.encode()).digest()
        now = asyncio.get_running_loop().time()
        until, asking = self._known.get(digest, (0.0, None))
        if asking is not None and asking.done() and until < now:
            asking = None
        if self._waiting >= _MAX_WAITING and (asking is None or not asking.done()):
            raise _busy(f"{_MAX_WAITING:,} requests wait for a scheduler")
        if asking is None:
            if self._asked >= _MAX_ASKED:
                raise _busy(f"{_MAX_ASKED} other keys are being checked")
            asking = asyncio.create_task(self._ask(token))
            self._known[digest] = (now + KEPT_S, asking)
            self._known.move_to_end(digest)
            while len(self._known) > _MAX_KEPT:
                self._known.popitem(last=False)
        self._waiting += 1
        try:
            return Caller(token, digest, *await asyncio.shield(asking))
        except errors.PacelineError as error:
            raise from_error(error) from None
        finally:
            self._waiting -= 1

    async def _ask(self, token: str) -> tuple[ModelInfo, str]:
        """What a model says, of itself and of who has the key; and its name, "" of the first model."""
        self._asked += 1
        until = time.monotonic() + self._client.failover_timeout_s
        try:
            while True:
                try:
                    name, limit_s = "", _PATIENCE_S
                    if self._is_away:
                        name, limit_s = await self._another(token), _TIMEOUT_S
                    info = await self._told(token, name, limit_s)
                except (errors.RetryLater, errors.DeadlineExceeded) as error:
                    self._is_away, self._silent_until = True, time.monotonic() + _SILENT_S
                    if error.code not in _NOT_THERE or time.monotonic() > until:
                        raise
                else:
                    self._is_away = bool(name)
                    return info, name
                await asyncio.sleep(_AGAIN_S)
        finally:
            self._asked -= 1

    async def _told(self, token: str, name: str, limit_s: float) -> ModelInfo:
        """What a model's schedulers say: the first one that answers. Raises `paceline.errors`."""
        view = self._client.view(token, {MODEL_KEY: name} if name else {})
        for _ in self._client.addresses[1:_MOST_SILENT]:
            with suppress(errors.DeadlineExceeded):
                return await view.model_info(timeout_s=min(limit_s, _PATIENCE_S))
        return await view.model_info(timeout_s=limit_s)

    async def _another(self, token: str) -> str:
        """The name of a model that serves; "": the first one, or none. Raises `paceline.errors`."""
        states = await self._client.view(token).models(timeout_s=_TIMEOUT_S)
        first, *others = states
        if states[first] == "serving" and time.monotonic() >= self._silent_until:
            return ""
        return next((name for name in others if states[name] == "serving"), "")


def _busy(message: str) -> Refusal:
    return Refusal(
        HTTPStatus.SERVICE_UNAVAILABLE, f"{message}; try again", "server_error", None, None, KEPT_S
    )


def token_of(authorization: str) -> str:
    """The token in an Authorization header; "" without one. Raises Refusal (401) for one that can be none."""
    token = authorization[len(_SCHEME) :].strip() if authorization[: len(_SCHEME)].lower() == _SCHEME else ""
    valid = len(token) <= _MAX_KEY and all("!" <= character <= "~" for character in token)
    if (authorization and not token) or not valid:
        raise Refusal(
            HTTPStatus.UNAUTHORIZED, "Authorization: expected `Bearer` and a key", code="invalid_api_key"
        )
    return token
