"""Who calls: a key is a token of the schedulers, which are asked about it before a body is read."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from http import HTTPStatus

import grpc
from paceline import ModelInfo, errors
from paceline.aio import Client

from paceline_openai.refusals import Refusal, from_error

KEPT_S = 1.0
"""For so long an answer about a key is not asked for again."""
_NOT_THERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_MAX_KEPT = 4096
_MAX_ASKED = 256
"""Keys that are being asked about at once; callers with further ones are refused."""
_TIMEOUT_S = 5.0
_FAILOVER_S = 30.0
"""For so long schedulers that are not there are asked again, as calls that generate are."""
_AGAIN_S = 0.2
_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller whom the schedulers know: its key, and what they tell it."""

    token: str
    digest: bytes  # SHA-256 of the key: whose share of budgets a request takes
    info: ModelInfo

    @property
    def name(self) -> str:
        """Its identity at the schedulers."""
        return self.info.caller.name if self.info.caller else ""

    @property
    def admin(self) -> bool:
        """Whether it is an administrator."""
        return bool(self.info.caller and self.info.caller.admin)


class Callers:
    """Asks the schedulers who has a key, by GetModelInfo, and keeps each answer for KEPT_S."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: OrderedDict[bytes, tuple[float, asyncio.Task[ModelInfo]]] = OrderedDict()
        self._asked = 0

    async def identify(self, authorization: str) -> Caller:
        """The caller of a request with this header. Raises Refusal (401, 403, 503)."""
        token = token_of(authorization)
        digest = hashlib.sha256(token.encode()).digest()
        now = asyncio.get_running_loop().time()
        until, asking = self._known.get(digest, (0.0, None))
        if asking is None or (asking.done() and until < now):
            if self._asked >= _MAX_ASKED:
                text = f"{_MAX_ASKED} other keys are being checked; try again"
                raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, text, "server_error", None, None, KEPT_S)
            asking = asyncio.create_task(self._ask(token))
            self._known[digest] = (now + KEPT_S, asking)
            self._known.move_to_end(digest)
            while len(self._known) > _MAX_KEPT:
                self._known.popitem(last=False)
        try:
            return Caller(token, digest, await asyncio.shield(asking))
        except errors.PacelineError as error:
            raise from_error(error) from None

    async def _ask(self, token: str) -> ModelInfo:
        self._asked += 1
        until = time.monotonic() + _FAILOVER_S
        try:
            while True:
                try:
                    return await self._client.view(token).model_info(timeout_s=_TIMEOUT_S)
                except (errors.RetryLater, errors.DeadlineExceeded) as error:
                    if error.code not in _NOT_THERE or time.monotonic() > until:
                        raise
                await asyncio.sleep(_AGAIN_S)
        finally:
            self._asked -= 1


def token_of(authorization: str) -> str:
    """The token in an Authorization header; "" without one. Raises Refusal (401) for one that can be none."""
    token = authorization[len(_SCHEME) :].strip() if authorization[: len(_SCHEME)].lower() == _SCHEME else ""
    if (authorization and not token) or not all("!" <= character <= "~" for character in token):
        raise Refusal(
            HTTPStatus.UNAUTHORIZED, "Authorization: expected `Bearer` and a key", code="invalid_api_key"
        )
    return token
