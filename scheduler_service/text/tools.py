"""The model's tokenizer and template at work: prompts to ids off the event loop, ids to text on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenizers import Tokenizer

from scheduler_service.model import TokenizerFiles
from scheduler_service.text.chat_template import ChatTemplate, ChatTemplateError
from scheduler_service.text.detokenizer import Detokenizer, UnsupportedTokenizerError, Vocabulary

_T = TypeVar("_T")

THREADS = 2


class UnusableTokenizerError(Exception):
    """The executor's tokenizer files can't be used; the message says why."""


class PromptTooLargeError(Exception):
    """The template made more text of the messages than a prompt may have."""


class BusyError(Exception):
    """Too many texts wait for the tokenizer."""


class TextTools:
    """Everything between text and token ids. `max_pending` prompts may wait for a thread."""

    def __init__(self, tokenizer: Tokenizer, files: TokenizerFiles, *, max_pending: int = 256) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer)
        self._bos_id: int | None = tokenizer.token_to_id(files.bos_token) if files.add_bos else None
        self._template = (
            ChatTemplate(files.chat_template, bos_token=files.bos_token, eos_token=files.eos_token)
            if files.chat_template
            else None
        )
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")
        self._max_pending = max_pending
        self._pending = 0

    @classmethod
    def made_of(cls, files: TokenizerFiles) -> TextTools | None:
        """The tools, or None if the model has no tokenizer. Raises UnusableTokenizerError."""
        if not files.tokenizer_json:
            return None
        try:
            tokenizer = Tokenizer.from_buffer(files.tokenizer_json)
        except Exception as error:  # the library raises nothing narrower
            raise UnusableTokenizerError(str(error)) from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        try:
            return cls(tokenizer, files)
        except (UnsupportedTokenizerError, ChatTemplateError) as error:
            raise UnusableTokenizerError(str(error)) from error

    @property
    def has_chat_template(self) -> bool:
        """Messages can be prompts."""
        return self._template is not None

    def detokenizer(self) -> Detokenizer:
        """For one completion."""
        return Detokenizer(self._vocabulary)

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of all these ids, as a stream of them would have it. Raises BusyError."""
        detokenizer = self.detokenizer()
        return await self._in_thread(lambda: detokenizer.push(ids) + detokenizer.flush())

    async def encode_text(self, text: str) -> list[int]:
        """Plain text to ids, with the model's first token if it wants one. Raises BusyError."""
        ids = await self._in_thread(lambda: self._encode(text))
        return ids if self._bos_id is None or ids[:1] == [self._bos_id] else [self._bos_id, *ids]

    async def encode_messages(self, messages: Sequence[Mapping[str, str]], max_bytes: int) -> list[int]:
        """Messages through the chat template to ids; the template writes the first token itself.

        Raises ChatTemplateError, PromptTooLargeError, BusyError.
        """
        template = self._template
        if template is None:
            raise ChatTemplateError("the model has no chat template")

        def work() -> list[int]:
            text = template.render(messages)
            if len(text.encode()) > max_bytes:
                raise PromptTooLargeError
            return self._encode(text)

        return await self._in_thread(work)

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        if self._pending >= self._max_pending:
            raise BusyError
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._pending -= 1
