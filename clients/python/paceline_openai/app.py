"""The ASGI application: OpenAI's API by calls of schedulers, each made as the caller."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from paceline import ModelInfo, errors
from paceline.aio import Client
from paceline.failover import MODEL_KEY
from service_kit.logs import Log

from paceline_openai import pages, sampling
from paceline_openai.beginnings import Beginnings
from paceline_openai.budget import BodyBudget
from paceline_openai.callers import Caller, Callers
from paceline_openai.calls import Call
from paceline_openai.exchange import Disconnected, Exchange, Receive, Scope, Send
from paceline_openai.json_body import read_object
from paceline_openai.metrics import CONTENT_TYPE, Metrics
from paceline_openai.origins import Origins
from paceline_openai.refusals import Refusal, bad, from_error
from paceline_openai.routes import Endpoint, endpoint_of, versioned
from paceline_openai.settings import Bounds
from paceline_openai.timeline import TimelinePage
from paceline_openai.vocabulary import Vocabularies

log = Log(__name__)

CLIENT_LEFT = 499
_MAX_NAME = 128  # of a model at an address that has several, and of a trace
_HEALTH_KEPT_S = 0.5
_HEALTH_TIMEOUT_S = 2.0


class Gateway:
    """An ASGI application. It uses `client`'s channels, and closes nothing.

    `model_name`: clients' name of the model; "": its own name. `origins`: of web pages
    that may call; ("*",): all. `local`: whether only programs of this machine reach it, so that a request
    whose Host is another's is one of a web page that goes by a name of its own (DNS rebinding).
    """

    def __init__(
        self,
        client: Client,
        bounds: Bounds = Bounds(),  # noqa: B008 - it is frozen
        *,
        model_name: str = "",
        origins: tuple[str, ...] = (),
        local: bool = False,
    ) -> None:
        self._client, self._bounds, self._model_name = client, bounds, model_name
        self._callers, self._vocabularies = Callers(client), Vocabularies()
        self._beginnings = Beginnings()
        self._budget = BodyBudget(bounds.max_body_bytes, bounds.max_bodies_bytes)
        self._origins = Origins(origins, local=local)
        self.metrics = Metrics()
        self._healthy_until, self._healthy = 0.0, False
        self._open: Mapping[str, Callable[[Exchange], Awaitable[None]]] = {
            "/": pages.chat,
            "/docs": pages.docs,
            "/openapi.json": pages.schema,
            "/health": self._health,
            "/liveness": _ok,
            "/version": _version,
            "/metrics": self._metrics,
            **dict.fromkeys(pages.ASSETS, pages.asset),
            **TimelinePage(client, self._callers).paths,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"no server of {scope['type']}")
        exchange = Exchange(scope, receive, send)
        endpoint = endpoint_of(exchange.path)
        name = endpoint.path if endpoint else exchange.path if exchange.path in self._open else "other"
        began = time.monotonic()
        caller, names = "", dict(endpoint.names if endpoint else {})
        self.metrics.live.inc()
        try:
            caller = await self._answer(exchange, endpoint, names)
        except Refusal as refusal:
            await exchange.refuse(refusal)
        except errors.PacelineError as error:
            await self._failed(exchange, from_error(error, names), error)
        except Disconnected:
            exchange.status = CLIENT_LEFT
        except Exception as error:
            log.error("an endpoint failed", error, endpoint=name, request=exchange.request_id)
            await exchange.refuse(Refusal(500, "internal error; the gateway's log has more", "server_error"))
        finally:
            took = time.monotonic() - began
            self.metrics.live.dec()
            self.metrics.requests.labels(name, str(exchange.status)).inc()
            self.metrics.duration.labels(name).observe(took)
            log.info("answered", method=exchange.method, endpoint=name, status=exchange.status,
                     ms=round(1000 * took), request=exchange.request_id, caller=caller)  # fmt: skip

    async def _failed(self, exchange: Exchange, refusal: Refusal, error: errors.PacelineError) -> None:
        if refusal.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error(
                "a scheduler failed", reason=error.reason, detail=error.message, request=exchange.request_id
            )
        await exchange.refuse(refusal)

    async def _answer(self, exchange: Exchange, endpoint: Endpoint | None, names: dict[str, str]) -> str:
        """Answer; returns the caller's name. Raises Refusal, `paceline.errors`, Disconnected.

        `names`: what the request calls fields of other endpoints; gets the name of its grammar's field.
        """
        if await self._origins.answered(exchange):
            return ""
        if endpoint is None:
            page = self._open.get(exchange.path)
            if page is None:
                path = exchange.path[:200]
                text = f"Invalid URL ({exchange.method} {path}){versioned(path)}"
                raise Refusal(HTTPStatus.NOT_FOUND, text, code="unknown_url")
            if exchange.method not in ("GET", "HEAD"):
                raise _not_allowed(exchange, "GET")
            await page(exchange)
            return ""
        if exchange.method != endpoint.method:
            raise _not_allowed(exchange, endpoint.method)
        caller = await self._callers.identify(exchange.header(b"authorization"))
        body: Mapping[str, Any] = {}
        values: Mapping[str, Any] = {}
        info, chosen = caller.info, dict[str, str]()
        if endpoint.table is not None:
            body = await self._body(exchange, caller)
            values = endpoint.table.read(body)
            names |= sampling.grammar_name(values)
            info, chosen = await self._model(caller, exchange, values)
        call = Call(
            exchange,
            self._client.view(caller.token, _passed_on(exchange) | chosen),
            info,
            self._vocabularies.of(info),
            values,
            body,
            self._beginnings,
            self._model_name,
            _deadline_s(exchange),
        )
        await _unless_left(exchange, endpoint.answer(call), _whole_answer_s(exchange, values))
        return caller.name

    async def _model(
        self, caller: Caller, exchange: Exchange, values: Mapping[str, Any]
    ) -> tuple[ModelInfo, dict[str, str]]:
        """The model that a request names, and the metadata of calls that mean it. Raises `paceline.errors`.

        Only an address of several models knows others than the caller's, and only they are asked for.
        """
        named: str = values.get("model") or ""
        if not named.isascii() or not named.isprintable() or len(named) > _MAX_NAME:
            named = ""  # the call will tell
        own = ("", self._model_name, caller.info.name, *(one.name for one in caller.info.adapters))
        if named in own and not caller.model:
            return caller.info, {}
        chosen = {MODEL_KEY: named} if named else {}
        try:
            view = self._client.view(caller.token, chosen)
            return await view.model_info(timeout_s=_deadline_s(exchange)), chosen
        except errors.NotFound:  # an adapter that was loaded a moment ago, or nothing: the call will tell
            return caller.info, {}

    async def _body(self, exchange: Exchange, caller: Caller) -> dict[str, Any]:
        kind = exchange.header(b"content-type").partition(";")[0].strip().lower()
        if kind != "application/json":  # else a web page could send it without asking first
            text = f"content-type: expected application/json, got {kind[:80]!r}"
            raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, text, code="unsupported_media_type", close=True)
        body = await exchange.body(self._budget, caller.digest, self._bounds.body_timeout_s)
        self.metrics.body_bytes.inc(len(body))
        return read_object(body)

    async def _health(self, exchange: Exchange) -> None:
        """200 if a scheduler takes requests."""
        now = time.monotonic()
        if now >= self._healthy_until:
            self._healthy = await self._client.is_serving(timeout_s=_HEALTH_TIMEOUT_S)
            self._healthy_until = time.monotonic() + _HEALTH_KEPT_S
        if not self._healthy:
            raise Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE, "no scheduler serves", "server_error", None, None, 1.0
            )
        await _ok(exchange)

    async def _metrics(self, exchange: Exchange) -> None:
        caller = await self._callers.identify(exchange.header(b"authorization"))
        if not caller.admin:
            text = "metrics are for administrators"
            raise Refusal(HTTPStatus.FORBIDDEN, text, "permission_error", "permission_denied")
        await exchange.reply(self.metrics.page(), headers=[(b"content-type", CONTENT_TYPE)])


async def _unless_left(exchange: Exchange, answering: Any, timeout_s: float | None) -> None:
    """Await the answer; cancels it and raises Disconnected when the client leaves, Refusal at the timeout."""
    answer = asyncio.ensure_future(answering)
    leaving = asyncio.ensure_future(exchange.left())
    try:
        await asyncio.wait({answer, leaving}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            answer.result()
            return
        answer.cancel()
        with suppress(asyncio.CancelledError, errors.PacelineError, Refusal):
            await answer
        if leaving.done():
            raise Disconnected
        text = f"the answer was not there after {timeout_s:g} s, which the client has said it waits"
        raise Refusal(HTTPStatus.GATEWAY_TIMEOUT, text, "server_error", "timeout")
    finally:
        for task in (answer, leaving):
            task.cancel()
        await asyncio.gather(answer, leaving, return_exceptions=True)


def _passed_on(exchange: Exchange) -> dict[str, str]:
    """Metadata of the caller's request that the schedulers get too."""
    given = exchange.header(b"traceparent")
    valid = given.isascii() and given.isprintable() and 0 < len(given) <= _MAX_NAME
    return {"traceparent": given} if valid else {}


def _deadline_s(exchange: Exchange) -> float | None:
    """The deadline that the client asks for by our own header, for streams too."""
    return _seconds(exchange, b"x-paceline-timeout-s")


def _whole_answer_s(exchange: Exchange, values: Mapping[str, Any]) -> float | None:
    """How long OpenAI's SDKs wait for a whole answer: they send it always, so it ends no stream."""
    return None if values.get("stream") else _seconds(exchange, b"x-stainless-read-timeout")


def _seconds(exchange: Exchange, name: bytes) -> float | None:
    given = exchange.header(name)
    if not given:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if seconds > 0:
        return min(seconds, 1e6)
    if name.startswith(b"x-stainless"):
        return None
    raise bad(None, f"{name.decode()}: expected seconds, got {given[:40]!r}")


def _not_allowed(exchange: Exchange, allowed: str) -> Refusal:
    exchange.extra_headers.append((b"allow", allowed.encode()))
    text = f"Not allowed to {exchange.method} on {exchange.path[:200]}; {allowed} is"
    return Refusal(HTTPStatus.METHOD_NOT_ALLOWED, text, code="method_not_allowed", close=True)


async def _ok(exchange: Exchange) -> None:
    await exchange.reply(b'{"status": "ok"}')


async def _version(exchange: Exchange) -> None:
    try:
        known = version("paceline")
    except PackageNotFoundError:
        known = ""
    await exchange.reply(json.dumps({"version": known}).encode())


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
