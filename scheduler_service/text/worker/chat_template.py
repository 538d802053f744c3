"""A model's chat template: Jinja from the executor, run in a sandbox on messages from clients."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(Exception):
    """The template can't be compiled, or refuses these messages; the message says why."""

    def __init__(self, message: str, field: str = "messages") -> None:
        super().__init__(message)
        self.field = field


class RenderedTooLargeError(Exception):
    """The rendered text is longer than a prompt may be."""


class GenerationBlock(Extension):
    """`{% generation %}` … `{% endgeneration %}`: what the assistant wrote, marked for training.

    It is rendered as it stands. As in transformers it is a call block, so variables set in it end with it.
    """

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """The call block that stands for the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Macro) -> str:
        return caller()


class ChatTemplate:
    """Renders messages to the text of a prompt, which ends where the assistant's turn begins."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(
            raise_exception=_raise_exception,
            bos_token=bos_token,
            eos_token=eos_token,
        )
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
            constants = (node.value for node in tree.find_all(nodes.Const))
            self.strings = frozenset(value for value in constants if isinstance(value, str))
            """String literals of the template: the strings that it can compare with or split at."""
            self.names = self.strings | {node.attr for node in tree.find_all(nodes.Getattr)}
            """The keys that it can look up, literals included."""
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error
        except MemoryError:
            raise
        except Exception as error:  # constants are folded when a template is compiled
            raise ChatTemplateError(f"the chat template does not compile: {type(error).__name__}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        max_bytes: int,
        now: datetime | None = None,
        *,
        arguments: Mapping[str, object] = MappingProxyType({}),
        tools: Sequence[Mapping[str, object]] = (),
        continues: bool = False,
        opens: bool = True,
    ) -> str:
        """The prompt's text. Each message has a `role` and a `content`.

        The size is checked while the text is rendered: at most `max_bytes` in UTF-8. `now` is the template's
        current time. `arguments` are further variables of the template, `tools` what the model may call. With
        `continues` the text ends where the content of the last message does, instead of where a new turn
        begins; without `opens` it ends after the last message.
        Raises ChatTemplateError, RenderedTooLargeError, MemoryError.
        """
        moment = now or datetime.now()
        variables = {
            "documents": None,  # as `transformers` has it: templates test whether it and `tools` are none
            **arguments,
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": opens and not continues,
            "strftime_now": moment.strftime,
        }
        pieces, size = [], 0
        try:
            for piece in self._template.generate(variables):
                size += len(piece) if piece.isascii() else len(piece.encode())
                if size > max_bytes:
                    raise RenderedTooLargeError
                pieces.append(piece)
        except (RenderedTooLargeError, MemoryError):
            raise
        except TemplateError as error:  # also from raise_exception, whose message is meant for users
            raise ChatTemplateError(str(error)) from error
        except Exception as error:  # expressions in a template may raise anything
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}") from error
        text = "".join(pieces)
        return _up_to(text, str(messages[-1]["content"])) if continues else text


def _up_to(text: str, content: str) -> str:
    """The text up to the end of the last message's content; the template may have trimmed its white space."""
    at = text.rfind(content.strip())
    if at < 0 or not content.strip():
        raise ChatTemplateError("the template does not write the last message's content as it is")
    whole = content.lstrip()
    return text[: at + len(whole if text.startswith(whole, at) else content.strip())]


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's own filter, which escapes HTML characters and so would change a prompt.

    Templates may pass any of its arguments by position.
    """
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
