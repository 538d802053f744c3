"""A caller's request to an endpoint, checked, with what it needs to be answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar

from paceline import ModelInfo
from paceline.aio import Client, Generation

from paceline_openai.beginnings import Beginnings
from paceline_openai.exchange import Exchange
from paceline_openai.refusals import Refusal
from paceline_openai.vocabulary import Vocabulary

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Call:
    """`client` makes calls as the caller. `values`: the checked fields of the `body`."""

    exchange: Exchange
    client: Client
    info: ModelInfo
    vocabulary: Vocabulary
    values: Mapping[str, Any]
    body: Mapping[str, Any]
    beginnings: Beginnings
    model_name: str = ""  # that clients may call the model
    timeout_s: float | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def shown_model(self) -> str:
        """The model's name in answers: as the request has it."""
        return self.values.get("model") or self.model_name or self.info.name

    @property
    def options(self) -> dict[str, Any]:
        """The SDK's option `model`; none if the request means the model itself."""
        given = self.values.get("model")
        return {} if not given or given == self.model_name else {"model": given}

    def affinity(self, turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The SDK's option `affinity_key` of a chat; none where the client's own key is as good."""
        key = self.values.get("prompt_cache_key") or self.beginnings.affinity_key(
            turns, self.client.addresses, self.shown_model, self.values.get("cache_salt", "")
        )
        return {"affinity_key": key} if key else {}

    def fingerprint(self, begun: Iterable[Generation]) -> str:
        """Of the model that gave the answer, for `system_fingerprint`.

        It may be another one than that of `info`, whose schedulers have just ended. Raises Refusal (503) if
        prompts of one request went to schedulers of different models.
        """
        found = {one.started.model_fingerprint for one in begun if one.started} or {
            self.info.model_fingerprint
        }
        if len(found) > 1:
            text = "prompts went to different models, of which one takes the other's place; try again"
            status = HTTPStatus.SERVICE_UNAVAILABLE
            raise Refusal(status, text, "server_error", "service_unavailable", None, 1.0)
        return f"fp_{found.pop().hex()[:16]}"


async def all_of(coroutines: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """The results of all, side by side. Raises the first error, and cancels the others then."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in coroutines]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
