"""The timeline at /timeline/: the page of `paceline timeline --web`, with what the caller's key may see.

It is of one model of an address that has several, or of one of several schedulers, which the page chooses.

Nothing is kept between two requests: each asks the scheduler for the steps after those that the page has.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, cast

from paceline import errors, timeline_page
from paceline.aio import Client
from paceline.failover import MODEL_KEY
from paceline.scheduler.v1 import scheduler_pb2 as pb

from paceline_openai.callers import Caller, Callers
from paceline_openai.exchange import Exchange
from paceline_openai.refusals import Refusal

_AT = "/timeline/"
_BEGIN_S = 600.0
"""Seconds: a page begins with the steps of the last ones."""
_FIRST_S, _READ_S = 2.0, 0.4
"""For so long an answer waits for steps, and for more: longer than schedulers do between two looks."""
_MOST_BYTES = 8 << 20
"""Of one answer's steps, about; the next one goes on."""
_ASK_S = 10.0
_MODEL, _SCHEDULER = "model:", "scheduler:"
_MAX_NAME = 128
_HEADERS = [(name.lower().encode(), value.encode()) for name, value in timeline_page.HEADERS.items()]
_JSON = [(b"content-type", b"application/json"), *_HEADERS]


class TimelinePage:
    """Answers what is below /timeline/. `paths`: what answers each."""

    def __init__(self, client: Client, callers: Callers) -> None:
        self._client, self._callers = client, callers
        self._secret = secrets.token_bytes(16)  # an address can't be guessed by its key
        self.paths: Mapping[str, Callable[[Exchange], Awaitable[None]]] = {
            _AT.rstrip("/"): _to_page,
            _AT: _file,
            **dict.fromkeys((_AT + name for name in timeline_page.FILES), _file),
            f"{_AT}about": self._about,
            f"{_AT}steps": self._steps,
            f"{_AT}why": self._why,
        }

    async def _about(self, exchange: Exchange) -> None:
        caller = await self._caller(exchange)
        choices = await self._choices(caller)
        source = caller.model or (choices[0][1] if choices else caller.info.name)
        await exchange.reply(timeline_page.about(source, live=True, choices=choices), headers=_JSON)

    async def _choices(self, caller: Caller) -> list[tuple[str, str]]:
        """What the page may be of, if there are several; only administrators see schedulers' addresses."""
        addresses = self._client.addresses
        try:
            models = await self._client.view(caller.token).models(timeout_s=_ASK_S)
        except errors.PacelineError:
            models = {}
        if len(models) > 1:
            return [(_MODEL + name, name) for name in models]
        if len(addresses) == 1:
            return []
        return [
            (_SCHEDULER + self._key(one), one if caller.admin else f"scheduler {number}")
            for number, one in enumerate(addresses, start=1)
        ]

    def _chosen(self, exchange: Exchange) -> tuple[dict[str, str], str]:
        """What a request is of: metadata of its calls, and the scheduler's address. Raises Refusal."""
        of = exchange.query("of")
        name = of.removeprefix(_MODEL)
        if of.startswith(_MODEL) and name.isascii() and name.isprintable() and len(name) <= _MAX_NAME:
            return {MODEL_KEY: name}, ""
        address = next((one for one in self._client.addresses if of == _SCHEDULER + self._key(one)), "")
        if of and not address:
            raise Refusal(HTTPStatus.NOT_FOUND, "there is no such scheduler or model any more", code="gone")
        return {}, address

    async def _steps(self, exchange: Exchange) -> None:
        """Here, the number of an answer is that of the next step."""
        caller = await self._caller(exchange)
        given = exchange.query("after")
        after = int(given) if given.isdecimal() and len(given) < 16 else 0
        metadata, address = self._chosen(exchange)
        begin: dict[str, Any] = {"first_step": after} if after else {"last_s": _BEGIN_S}
        parts, size, error = list[bytes](), 0, ""
        view = self._client.view(caller.token, metadata)
        steps = view.step_logs(**begin, address=address, timeout_s=_ASK_S)
        logs = cast("AsyncGenerator[pb.StepLog, None]", steps)
        try:
            async with aclosing(logs), asyncio.timeout(_FIRST_S) as limit:
                async for log in logs:
                    if not parts:
                        limit.reschedule(asyncio.get_running_loop().time() + _READ_S)
                    parts.append(timeline_page.part(log))
                    after, size = log.first_step + len(log.started_us), size + len(parts[-1])
                    if size > _MOST_BYTES:
                        break
        except (TimeoutError, errors.DeadlineExceeded):
            pass
        except errors.InvalidRequest:  # the scheduler was started again, and has fewer steps
            after = 0
        except errors.PacelineError as failure:
            error = str(failure)
            if not (isinstance(failure, errors.RetryLater) and failure.reason):
                after = 0  # it may be started again: then its steps have other numbers
        await exchange.reply(timeline_page.steps(parts, after, error), headers=_JSON)

    async def _why(self, exchange: Exchange) -> None:
        caller = await self._caller(exchange)
        whose = exchange.query("identity")
        view = self._client.view(caller.token, self._chosen(exchange)[0])
        try:
            text = timeline_page.why(await view.why(exchange.query("id"), identity=whose, timeout_s=_ASK_S))
        except errors.PacelineError as error:
            text = str(error)
        await exchange.reply(json.dumps({"text": text}).encode(), headers=_JSON)

    def _key(self, address: str) -> str:
        """A scheduler's name for those who may not see its address."""
        return hashlib.blake2b(address.encode(), key=self._secret, digest_size=8).hexdigest()

    async def _caller(self, exchange: Exchange) -> Caller:
        """Raises Refusal."""
        return await self._callers.identify(exchange.header(b"authorization"))


async def _to_page(exchange: Exchange) -> None:
    """The page's files are named from its own path on."""
    where = (b"location", _AT.strip("/").encode() + b"/")
    await exchange.reply(b"", HTTPStatus.PERMANENT_REDIRECT, [where, *_HEADERS])


async def _file(exchange: Exchange) -> None:
    name = exchange.path.removeprefix(_AT) or "index.html"
    headers = [(b"content-type", timeline_page.FILES[name].encode()), *_HEADERS]
    await exchange.reply(timeline_page.file(name), headers=headers)
