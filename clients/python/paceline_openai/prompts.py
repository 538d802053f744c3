"""Prompts that are shown in the answer, with their token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from paceline_openai.calls import Call, all_of

Prompt: TypeAlias = str | list[int]
"""A text, or token ids."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is shown. `ids` is empty where nobody needs them."""

    text: str
    ids: list[int]


async def echoes(call: Call, prompts: list[Prompt]) -> list[Echo | None]:
    """Each prompt's text and, for logprobs, its token ids. Raises `paceline.errors`."""
    wants_ids = "logprobs" in call.values or call.values.get("max_tokens") == 0

    async def one(prompt: Prompt) -> Echo:
        if isinstance(prompt, str):
            return Echo(prompt, await call.client.tokenize(prompt) if wants_ids else [])
        return Echo(await call.client.detokenize(prompt), prompt)

    return [*await all_of(map(one, prompts))]
