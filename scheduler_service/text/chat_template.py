"""A model's chat template: Jinja from the executor, run in a sandbox on messages from clients."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(Exception):
    """The template can't be compiled, or does not take these messages; the message says why."""


class ChatTemplate:
    """Renders messages to the text of a prompt that ends where the assistant's turn begins."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            bos_token=bos_token,
            eos_token=eos_token,
        )
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt's text. Each message has a `role` and a `content`."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True)
        except TemplateError as error:  # raise_exception's too: written for the template's users
            raise ChatTemplateError(str(error)) from error
        except Exception as error:  # a template is a program, and can fail like one
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}") from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would change a prompt."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
