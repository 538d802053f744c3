"""Prompts to token ids, by a model's tokenizer and chat template."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType

from tokenizers import Tokenizer

from scheduler_service.text.vocabulary import TokenBytes
from scheduler_service.text.worker.chat_template import ChatTemplate, ChatTemplateError
from scheduler_service.text.worker.control_tokens import ControlTokens, RenamedTokenizer
from scheduler_service.text.worker.pieces import pieces_of

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "model"})
"""Roles accepted with any template; others are accepted if they are string literals of the template."""
TRIAL = "The quick brown fox: 123 naïve 日本語"
UNKNOWN = "\U0010fffe\U000efffe"
"""Characters that no vocabulary has."""


@dataclass(frozen=True, slots=True)
class Files:
    """The tokenizer and chat template that an executor sent."""

    tokenizer_json: bytes
    chat_template: str  # "" when the model has none
    bos_token: str
    eos_token: str
    add_bos: bool


class Encoder:
    """Prompts to ids. Thread-safe. Any exception of the constructor tells what is wrong with the files."""

    def __init__(self, files: Files) -> None:
        self._tokenizer = tokenizer = Tokenizer.from_buffer(files.tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.pieces: TokenBytes = pieces_of(tokenizer)
        self._bos_id: int | None = tokenizer.token_to_id(files.bos_token) if files.add_bos else None
        self._template = (
            ChatTemplate(files.chat_template, bos_token=files.bos_token, eos_token=files.eos_token)
            if files.chat_template
            else None
        )
        quoted = self._template.strings if self._template is not None else frozenset[str]()
        names = self._template.names if self._template is not None else frozenset[str]()
        self._roles = ROLES | quoted
        self._control = ControlTokens(tokenizer, files.chat_template, quoted, names)
        # The id of unknown text is no control token, although tokenizers mark it as special.
        self._counted = frozenset(self._control.ids.values()) - frozenset(self._encode(UNKNOWN))
        self._renamed: RenamedTokenizer | None = None
        self._renaming = threading.Lock()
        self._encode(TRIAL)  # compiles the tokenizer's regular expressions

    def added_tokens(self, texts: Iterable[str]) -> dict[str, int]:
        """The ids of those texts that are added tokens of the tokenizer, by text."""
        added = {token.content: id_ for id_, token in self._tokenizer.get_added_tokens_decoder().items()}
        return {text: added[text] for text in texts if text in added}

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be prompts."""
        return self._template is not None

    def encode_text(self, text: str, *, begins: bool = True) -> array[int]:
        """Ids of text. Control tokens in it are recognized; BOS is prepended if the model adds it.

        Without `begins`, the text follows another one: it gets no BOS.
        """
        ids = self._encode(text)
        if self._bos_id is None or not begins or ids[:1] == [self._bos_id]:
            return array("I", ids)
        return array("I", [self._bos_id, *ids])

    def encode_whole(self, text: str) -> tuple[array[int], bool]:
        """Ids of text, with all tokens that the post-processor adds; whether the first one is such a token.

        Control tokens in the text are recognized.
        """
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=True)[0]
        return array("I", encoding.ids), encoding.special_tokens_mask[:1] == [1]

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, object]],
        max_bytes: int,
        *,
        arguments: Mapping[str, object] = MappingProxyType({}),
        tools: Sequence[Mapping[str, object]] = (),
        continues: bool = False,
        opens: bool = True,
    ) -> array[int]:
        """Ids of messages, rendered by the chat template; BOS is added by the template alone.

        `arguments`, `tools`, `continues` and `opens` are those of ChatTemplate.render.
        Raises ChatTemplateError, RenderedTooLargeError.
        """
        template, control = self._template, self._control
        if template is None:
            raise ChatTemplateError("the model has no chat template")
        for index, message in enumerate(messages):
            if (role := message["role"]) not in self._roles:
                known = ", ".join(sorted(ROLES))
                raise ChatTemplateError(
                    f"{role!r:.40} is none of {known}, and the chat template has no such role",
                    f"messages[{index}].role",
                )
        now = datetime.now()
        text = template.render(
            messages, max_bytes, now, arguments=arguments, tools=tools, continues=continues, opens=opens
        )
        spans = control.spans(text)
        marked, own = text, spans
        restored: Callable[[str], str] = str
        foreign = [*map(_without_role, messages), arguments, *tools]
        values = [value for fields in foreign for value in fields.values()]
        if control.doubtful(values):
            if control.has_marks(values):
                raise ChatTemplateError("parts of control tokens beside characters from U+F0000 on")
            # The marked text may be 4 times as long: a private-use character has 4 bytes in UTF-8.
            marked = template.render(
                [
                    control.marked_values(_without_role(message)) | {"role": message["role"]}
                    for message in messages
                ],
                4 * max_bytes,
                now,
                arguments=control.marked_values(arguments),
                tools=[control.marked_values(tool) for tool in tools],
                continues=continues,
                opens=opens,
            )
            own, restored = control.spans(marked), control.unmarked
        expected = [span.id for span in own if span.id in self._counted]
        if own == spans:
            ids = self._encode(text)
            if self._controls(ids) == expected:
                return array("I", ids)
        if marked is not text and restored(marked) != text:
            raise ChatTemplateError("the template changes text that holds parts of control tokens")
        renamed = self._renamed_tokenizer()
        ids = renamed.encode(renamed.named(marked, own, restored))
        if self._controls(ids) != expected:
            raise ChatTemplateError("text that can't be told from control tokens")
        return array("I", ids)

    def _controls(self, ids: Sequence[int]) -> list[int]:
        counted = self._counted
        return [id_ for id_ in ids if id_ in counted] if not counted.isdisjoint(ids) else []

    def _encode(self, text: str) -> list[int]:
        # Unlike `encode`, `encode_batch_fast` releases the interpreter lock.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _renamed_tokenizer(self) -> RenamedTokenizer:
        """The renamed tokenizer, made at first use because it doubles the tokenizer's memory."""
        with self._renaming:
            if self._renamed is None:
                self._renamed = RenamedTokenizer(self._tokenizer, self._control)
            return self._renamed


def _without_role(message: Mapping[str, object]) -> dict[str, object]:
    """A message without its role: that is one of a few names, which templates compare."""
    return {key: value for key, value in message.items() if key != "role"}
