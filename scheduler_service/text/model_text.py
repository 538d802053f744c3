"""The served model's text: prompts to ids in the tokenizer processes, ids to text here."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from types import MappingProxyType

import numpy as np
from service_kit.logs import Log

from scheduler_service.chat import formats, reasoning
from scheduler_service.chat.argument_texts import TextArguments
from scheduler_service.chat.tools import SentTool
from scheduler_service.model import TokenizerSource
from scheduler_service.text.detokenizer import Detokenizer
from scheduler_service.text.errors import ChatTemplateUnusable, PromptError, UnusableTokenizerError
from scheduler_service.text.frames import unpack_ints
from scheduler_service.text.items import ChatItem, TextItem
from scheduler_service.text.pool import LoadedTokenizer, TextPool
from scheduler_service.text.vocabulary import Vocabulary

log = Log(__name__)

MARKERS = (*formats.MARKERS, *reasoning.MARKERS)
"""Texts that may be added tokens, and then mean something in a model's output."""
DECODED_AT_ONCE = 4096
"""Ids that are decoded before other tasks of the event loop get a turn."""


class ModelText:
    """The served model's tokenizer, detokenizer and chat template."""

    def __init__(
        self,
        pool: TextPool,
        vocabulary: Vocabulary,
        *,
        vocab_size: int,
        has_chat_template: bool,
        added: Mapping[str, int] = MappingProxyType({}),
        unusable_template: str = "",
    ) -> None:
        self._pool, self._vocab_size = pool, vocab_size
        self.vocabulary = vocabulary
        """The bytes of each token id, for a Detokenizer."""
        self.has_chat_template = has_chat_template
        """Whether messages can be prompts."""
        self.added = added
        """The ids of those markers that are added tokens, by text."""
        self._unusable_template = unusable_template  # why; "": it can be used, or there is none

    @classmethod
    async def made_of(
        cls, files: TokenizerSource, pool: TextPool, vocab_size: int, more_markers: Sequence[str] = ()
    ) -> ModelText | None:
        """Load the files; returns None if the model has no tokenizer. Raises UnusableTokenizerError.

        `vocab_size`: the model's number of token ids. A tokenizer may know more, of which no prompt may be.
        `more_markers`: looked for beside MARKERS.

        A chat template that can't be used costs the model its chats, not its texts.
        """
        if not files.tokenizer_json:
            return None
        why, markers = "", (*MARKERS, *more_markers)
        try:
            loaded = await _loaded(pool, files, markers)
        except UnusableTokenizerError as error:
            if not files.chat_template:
                raise
            why = str(error)
            loaded = await _loaded(pool, replace(files, chat_template=""), markers)
            log.warning("chats are refused: the model's chat template can't be used", why=why)
        return cls(
            pool,
            Vocabulary(loaded.pieces),
            vocab_size=vocab_size,
            has_chat_template=loaded.has_chat_template,
            added=loaded.added,
            unusable_template=why,
        )

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, the same that a stream of them has."""
        detokenizer = Detokenizer(self.vocabulary)
        texts = []
        for start in range(0, len(ids), DECODED_AT_ONCE):
            texts.append(detokenizer.push(ids[start : start + DECODED_AT_ONCE]))
            await asyncio.sleep(0)
        return "".join(texts) + detokenizer.flush()

    async def encode_text(self, text: str, caller: str = "", *, begins: bool = True) -> array[int]:
        """Ids of plain text, with BOS in front if the tokenizer's configuration says so and it `begins`.

        Text that spells a control token becomes that token. `caller`: who takes turns with other callers in
        the pool. Raises PromptError if the text can't be tokenized, or only to tokens that the model does not
        have, BusyError if too much text is queued (a retry may succeed), StuckError if the tokenizer process
        does not answer.
        """
        answer = await self._pool.submit({"op": "text", "begins": begins}, text.encode(), caller)
        return self._known(unpack_ints(answer))

    async def encode_messages(
        self,
        messages: Sequence[Mapping[str, object]],
        max_bytes: int,
        *,
        arguments: Mapping[str, object] = MappingProxyType({}),
        tools: Sequence[SentTool] = (),
        continues: bool = False,
        opens: bool = True,
        caller: str = "",
    ) -> array[int]:
        """Token ids of messages, rendered by the chat template; BOS is added by the template alone.

        Arguments of calls in messages are JSON; the template gets text for those that are no object.
        Text in a message that spells a control token is tokenized as plain text. `max_bytes` limits the
        rendered text, `arguments` are further variables of the template, `tools` what the model may call, and
        with `continues` the prompt ends with the last message's content, and without `opens` after the last
        message. `caller` and errors are those of
        `encode_text`; ChatTemplateUnusable if the model's template can't be used.
        """
        self._check_chats("messages")
        chat = {
            "messages": messages,
            "arguments": dict(arguments),
            "tools": list(tools),
            "continues": continues,
            "opens": opens,
        }
        payload = json.dumps(chat, ensure_ascii=False).encode()
        answer = await self._pool.submit({"op": "chat", "max_bytes": max_bytes}, payload, caller)
        return self._known(unpack_ints(answer), "messages")

    async def encode_items(
        self, items: Sequence[TextItem], max_bytes: int, *, caller: str = ""
    ) -> list[array[int]]:
        """Token ids of each item, at least one; `max_bytes` limits the rendered text of a chat.

        `caller` and errors are those of `encode_messages`, which name the item's field.
        """
        if not items:
            return []
        for chat in (item for item in items if isinstance(item, ChatItem)):
            self._check_chats(chat.field)
        payload = json.dumps([item.sent() for item in items], ensure_ascii=False).encode()
        answer = unpack_ints(
            await self._pool.submit({"op": "items", "max_bytes": max_bytes}, payload, caller)
        )
        ends = list(accumulate(answer[: len(items)], initial=len(items)))
        found = [answer[start:end] for start, end in pairwise(ends)]
        return [self._known(ids, item.field) for ids, item in zip(found, items, strict=True)]

    def _known(self, ids: array[int], field: str = "") -> array[int]:
        """The ids. Raises PromptError unless the model has all of them."""
        if (highest := int(np.asarray(ids).max(initial=0))) >= self._vocab_size:
            why = f"makes token {highest}, but the model has {self._vocab_size} tokens"
            raise PromptError(why, field)
        return ids

    def _check_chats(self, field: str) -> None:
        """Raises PromptError without a chat template, ChatTemplateUnusable with one that can't be used."""
        if self._unusable_template:
            why = f"the model's chat template can't be used: {self._unusable_template}"
            raise ChatTemplateUnusable(why, field)
        if not self.has_chat_template:
            raise PromptError("the model has no chat template", field)

    async def grammar_of_calls(
        self,
        tools: Sequence[tuple[int, SentTool]],
        style: str,
        *,
        demanded: bool,
        max_calls: int = 0,
        caller: str = "",
    ) -> str:
        """A Lark grammar of an output with calls of these tools, each with its index in the request.

        `style`: the name of the format, which has a grammar of text and calls if they are not `demanded`;
        `max_calls`: 0: any number. `caller` and errors are those of `encode_text`; PromptError if there is no
        grammar of the tools.
        """
        header = {"op": "calls", "style": style, "demanded": demanded, "max_calls": max_calls}
        return (
            await self._pool.submit(header, json.dumps(tools, ensure_ascii=False).encode(), caller)
        ).decode()

    async def texts_of_tools(
        self, tools: Sequence[SentTool], *, caller: str = ""
    ) -> dict[str, TextArguments]:
        """The arguments that may be texts, of each of these tools by name.

        `caller` and errors are those of `encode_text`; PromptError for a tool whose parameters are no schema.
        """
        payload = json.dumps(tools, ensure_ascii=False).encode()
        found = json.loads(await self._pool.submit({"op": "texts"}, payload, caller))
        return {
            name: {key: frozenset(others) for key, others in texts.items()} for name, texts in found.items()
        }


async def _loaded(pool: TextPool, files: TokenizerSource, markers: Sequence[str]) -> LoadedTokenizer:
    """As `TextPool.load`, and once more if the process was lost: something else may have ended it."""
    try:
        return await pool.load(files, markers)
    except UnusableTokenizerError as error:
        if error.__cause__ is None:  # the files are at fault
            raise
    return await pool.load(files, markers)
