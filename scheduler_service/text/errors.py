"""What can go wrong between a prompt's text and its token ids.

TextError
├── UnusableTokenizerError   an executor's files can't be used
├── PromptError              this prompt can't be tokenized; names the field
├── BusyError                too much waits for the tokenizer: later
└── StuckError               the tokenizer does not answer, for no fault of the prompt
"""

from __future__ import annotations


class TextError(Exception):
    """The root; the message says why."""


class UnusableTokenizerError(TextError):
    """The executor's tokenizer or chat template can't be used."""


class PromptError(TextError):
    """This prompt can't be tokenized. `field` is of the request; "" for the whole prompt."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class BusyError(TextError):
    """Too much text waits for the tokenizer."""


class StuckError(TextError):
    """The tokenizer does not answer."""
