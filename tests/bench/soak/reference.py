"""What is asked for in a soak, and the answers that an undisturbed stack gave."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import aio
from paceline.chat import Message
from paceline.types import Completion, Delta, Event

from tests.support.held_streams import essence

WORDS = ("the", "paceline", "rides", "on", "behind", "its", "leader", "while", "wind", "and", "rain", "turn")
BIG_PROMPT_BYTES = 6_000
GRAMMARS: Sequence[Mapping[str, Any]] = (
    {
        "schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 30},
                "lap": {"type": "integer"},
                "places": {"type": "array", "items": {"type": "integer"}, "maxItems": 8},
            },
            "required": ["name", "lap", "places"],
            "additionalProperties": False,
        }
    },
    {"regex": "(the [a-z]{2,9} rides( on)?[,.] )+"},
    {"choices": ["yes", "no", "maybe, if the wind turns"]},
    {"grammar": 'start: "(" (start | /[0-9]{1,4}/)* ")"'},
)
AT_ONCE = 8


class WrongAnswer(Exception):
    """Other tokens, text or logprobs than undisturbed."""


@dataclass(frozen=True)
class Question:
    """A request that can be asked again and again, and always has the same answer."""

    number: int
    options: Mapping[str, Any]
    text: str = ""
    messages: Sequence[Message] = ()

    def ask(self, client: aio.Client, timeout_s: float | None = None, **more: Any) -> aio.Generation:
        """Start it."""
        return client.generate(**self._prompt, timeout_s=timeout_s, **{**self.options, **more})

    async def ask_unary(self, client: aio.Client, timeout_s: float | None = None) -> list[Completion]:
        """The whole answer."""
        return await client.completions(**self._prompt, timeout_s=timeout_s, **self.options)

    @property
    def _prompt(self) -> dict[str, Any]:
        return {"messages": self.messages} if self.messages else {"prompt": self.text}


def questions(seed: int, count: int = 40) -> list[Question]:
    """Long and short, one completion and several, with stops, logprobs, drafts and grammars or without."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        options: dict[str, Any] = {
            "seed": rng.getrandbits(64),
            "temperature": rng.choice([0.0, 0.7, 1.2]),
            "max_tokens": rng.choice([1, 5, 40, 120, 300]),
            "speculation": rng.choice(["off", "auto", 3]),
            "ignore_eos": rng.random() < 0.8,
        }
        if rng.random() < 0.3:
            options["n"] = rng.choice([2, 3])
        if rng.random() < 0.3:
            options["logprobs"] = rng.choice([0, 5, 20])
        if rng.random() < 0.3:
            options["stop"] = [rng.choice("aeiouxyz0123456789"), "never to be seen"]
            options["include_stop_string"] = rng.random() < 0.5
        if rng.random() < 0.2:
            options |= {"repetition_penalty": 1.3, "top_p": 0.9, "min_tokens": 1}
        if rng.random() < 0.35:
            options |= {"ignore_eos": False, **rng.choice(GRAMMARS)}
        text = f"{number}: " + " ".join(rng.choices(WORDS, k=rng.choice([1, 10, 60])))
        if number % 8 == 0:
            text += " " + "".join(rng.choices("0123456789 ", k=BIG_PROMPT_BYTES))
        chat = [Message("user", text), Message("assistant", "<|eos|>"), Message("user", "on")]
        found.append(Question(number, options, text, chat if number % 5 == 0 else ()))
    return found


class Reference:
    """The questions with their answers."""

    def __init__(self, questions: Sequence[Question], answers: Sequence[list[Completion]]) -> None:
        self.questions = questions
        self._answers = answers

    @classmethod
    async def asked(cls, questions: Sequence[Question], client: aio.Client) -> Reference:
        """Ask all of them while nothing happens."""
        limit = asyncio.Semaphore(AT_ONCE)

        async def answer(question: Question) -> list[Completion]:
            async with limit:
                return [essence(one) for one in await question.ask(client).collect()]

        return cls(questions, await asyncio.gather(*(answer(question) for question in questions)))

    def check(self, question: Question, answer: Sequence[Completion]) -> None:
        """Raises WrongAnswer unless this is the answer."""
        expected = self._answers[question.number]
        if (got := [essence(one) for one in answer]) != expected:
            raise WrongAnswer(f"question {question.number}: {got} instead of {expected}")

    def check_begin(self, question: Question, events: Sequence[Event]) -> None:
        """Raises WrongAnswer unless these events begin the answer."""
        for one in self._answers[question.number]:
            deltas = [event for event in events if isinstance(event, Delta) and event.index == one.index]
            ids = [id_ for event in deltas for id_ in event.token_ids]
            text = "".join(event.text for event in deltas)
            if list(one.token_ids[: len(ids)]) != ids or not one.text.startswith(text):
                raise WrongAnswer(f"question {question.number}: begins with {ids}, {text!r}")
