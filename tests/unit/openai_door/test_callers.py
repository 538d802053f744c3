"""Who calls is asked of the first model, and of another one that serves while the first one is silent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from paceline import errors
from paceline.aio import Client
from paceline.failover import MODEL_KEY
from paceline_openai.callers import Callers
from paceline_openai.refusals import Refusal


class Schedulers:
    """A client of several models, of which some are `silent`. `asked`: models, each with the time it had.

    Those that are `frozen` are silent, and told to serve.
    """

    addresses = ("127.0.0.1:1",)
    failover_timeout_s = 30.0

    def __init__(self, *silent: str, frozen: str = "") -> None:
        self.silent, self.frozen = {*silent, frozen}, frozen
        self.asked: list[tuple[str, float]] = []

    def view(self, token: str, metadata: Mapping[str, str] | None = None) -> Any:
        name = (metadata or {}).get(MODEL_KEY, "first")

        async def model_info(*, timeout_s: float) -> Any:
            self.asked.append((name, timeout_s))
            if token == "wrong":
                raise errors.Unauthenticated("no", code=grpc.StatusCode.UNAUTHENTICATED)
            if name in self.silent:
                raise errors.DeadlineExceeded("late", code=grpc.StatusCode.DEADLINE_EXCEEDED)
            return SimpleNamespace(name=name, caller=None)

        async def models(*, timeout_s: float) -> dict[str, str]:
            loading = self.silent - {self.frozen}
            return {name: "loading" if name in loading else "serving" for name in ("first", "b", "c")}

        return SimpleNamespace(model_info=model_info, models=models)


async def asked(callers: Callers, key: str) -> tuple[str, str]:
    caller = await callers.identify(f"Bearer {key}")
    return caller.info.name, caller.model


async def test_another_model_is_asked_while_the_first_one_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_openai.callers._SILENT_S", 0.0)
    schedulers = Schedulers("first", "b")
    callers = Callers(cast(Client, schedulers))
    assert await asked(callers, "one") == ("c", "c")
    assert await asked(callers, "two") == ("c", "c")
    [(first, patience_s), (other, limit_s), *later] = schedulers.asked
    assert (first, other, [name for name, _ in later]) == ("first", "c", ["c"])
    assert patience_s < limit_s
    schedulers.silent.clear()
    assert await asked(callers, "three") == ("first", "")
    assert await asked(callers, "four") == ("first", "")
    assert schedulers.asked[-1] == ("first", patience_s)


async def test_a_first_model_that_is_frozen_is_not_asked_again_at_once() -> None:
    schedulers = Schedulers(frozen="first")
    callers = Callers(cast(Client, schedulers))
    assert [await asked(callers, key) for key in ("one", "two")] == [("b", "b")] * 2
    assert [name for name, _ in schedulers.asked] == ["first", "b", "b"]


async def test_a_wrong_key_is_refused_whoever_is_silent() -> None:
    callers = Callers(cast(Client, Schedulers("first")))
    assert await asked(callers, "one") == ("b", "b")
    with pytest.raises(Refusal) as refused:
        await asked(callers, "wrong")
    assert refused.value.status == 401


async def test_few_requests_wait_while_no_scheduler_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_openai.callers._MAX_WAITING", 3)
    schedulers = Schedulers("first", "b", "c")
    callers = Callers(cast(Client, schedulers))
    waiting = [asyncio.create_task(asked(callers, "one")) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Refusal) as refused:
        await asked(callers, "one")
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1.0)
    schedulers.silent.clear()
    assert {name for name, _ in await asyncio.gather(*waiting)} <= {"first", "b"}
    assert await asked(callers, "one")
