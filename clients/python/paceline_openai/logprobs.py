"""Logprobs in the two forms of OpenAI's API: of chats, and of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline import TokenLogprobs

from paceline_openai.calls import Call
from paceline_openai.vocabulary import Vocabulary


async def learned(call: Call) -> Vocabulary:
    """The vocabulary of the model, known. Raises `paceline.errors`."""
    await call.vocabulary.learn(call.client, call.info)
    return call.vocabulary


async def of_chat(call: Call, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """One entry a token: its text, bytes and logprob, and those of the likeliest tokens."""
    vocabulary = await learned(call)

    def entry(token: int, logprob: float) -> dict[str, Any]:
        content = vocabulary.bytes_of(token)
        return {"token": content.decode(errors="replace"), "logprob": logprob, "bytes": list(content)}

    return [
        {**entry(token, one.logprob), "top_logprobs": [entry(*other) for other in one.top]}
        for token, one in zip(ids, logprobs, strict=True)
    ]


class CompletionLogprobs:
    """The logprobs of one completion, part by part; each part goes on with the running `text_offset`."""

    def __init__(self, call: Call, *, alternatives: bool) -> None:
        self._call, self._alternatives = call, alternatives
        self._offset = 0  # characters of the text before the next token

    async def part(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any] | None]:
        """Parallel arrays, one entry a token; None for the prompt's first token, which has no logprob."""
        vocabulary = await learned(self._call)
        texts = [vocabulary.text_of(token) for token in ids]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        tops = [
            None if one is None else {vocabulary.text_of(token): logprob for token, logprob in one.top}
            for one in logprobs
        ]
        return {
            "tokens": texts,
            "token_logprobs": [None if one is None else one.logprob for one in logprobs],
            "top_logprobs": tops if self._alternatives else None,
            "text_offset": offsets,
        }


def joined(parts: Sequence[dict[str, list[Any] | None]]) -> dict[str, list[Any] | None]:
    """Parts of one completion as one."""
    whole: dict[str, list[Any] | None] = {}
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        arrays = [part[name] for part in parts]
        whole[name] = None if None in arrays else [one for array in arrays for one in array or ()]
    return whole
