"""A model's tokenizer and chat template at work: prompts to token ids."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from scheduler_service.text.vocabulary import Pieces
from scheduler_service.text.worker.chat_template import ChatTemplate, ChatTemplateError
from scheduler_service.text.worker.pieces import pieces_of

TRIAL = "The quick brown fox: 123 naïve 日本語"


@dataclass(frozen=True, slots=True)
class Files:
    """What an executor says of its tokenizer."""

    tokenizer_json: bytes
    chat_template: str  # "" when the model has none
    bos_token: str
    eos_token: str
    add_bos: bool


class Encoder:
    """Prompts to ids. Thread-safe. Any exception of its making says what is wrong with the files."""

    def __init__(self, files: Files) -> None:
        self._tokenizer = tokenizer = Tokenizer.from_buffer(files.tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.pieces: Pieces = pieces_of(tokenizer)
        self._bos_id: int | None = tokenizer.token_to_id(files.bos_token) if files.add_bos else None
        self._template = (
            ChatTemplate(files.chat_template, bos_token=files.bos_token, eos_token=files.eos_token)
            if files.chat_template
            else None
        )
        self._encode(TRIAL)  # compiles the patterns of the tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Messages can be prompts."""
        return self._template is not None

    def encode_text(self, text: str) -> array[int]:
        """Text to ids, control tokens included, with the model's first token if it wants one."""
        ids = self._encode(text)
        return array("i", ids if self._bos_id is None or ids[:1] == [self._bos_id] else [self._bos_id, *ids])

    def encode_messages(self, messages: Sequence[Mapping[str, object]], max_bytes: int) -> array[int]:
        """Messages through the template to ids; the template writes the first token itself.

        Raises ChatTemplateError, RenderedTooLargeError.
        """
        if self._template is None:
            raise ChatTemplateError("the model has no chat template")
        return array("i", self._encode(self._template.render(messages, max_bytes)))

    def _encode(self, text: str) -> list[int]:
        # `encode` would hold the interpreter for all of its time.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids
