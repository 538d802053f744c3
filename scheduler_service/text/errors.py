"""Errors of tokenizing.

TextError
├── UnusableTokenizerError   the executor's tokenizer or chat template can't be used
├── PromptError              this prompt can't be tokenized; names the field
├── ChatTemplateUnusable     the model's chat template can't be used, so it has no chats; names the field
├── BusyError                too much text is queued: the caller may try again later
└── StuckError               the tokenizer process does not answer; the prompt need not be at fault
"""

from __future__ import annotations


class TextError(Exception):
    """Base class; the message says why."""


class UnusableTokenizerError(TextError):
    """The executor's tokenizer or chat template can't be used."""


class PromptError(TextError):
    """This prompt can't be tokenized. `field`: the request's field at fault; "": the whole prompt."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class ChatTemplateUnusable(TextError):
    """The model has a chat template that can't be used. `field`: the request's, which has messages."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class BusyError(TextError):
    """Too much text is queued for the tokenizer."""


class StuckError(TextError):
    """The tokenizer process does not answer."""
