"""Checks GenerateRequest.grammar, as far as that takes no compiling."""

from __future__ import annotations

from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.chat.json_object import parse_object
from scheduler_service.core.request import OutputGrammar
from scheduler_service.errors import invalid, unsupported
from scheduler_service.model import ServedModel
from scheduler_service.rpc.codec.checks import check_size
from scheduler_service.streams.request import ChatPrompt, Prompt

_KINDS = tuple(field.name for field in pb.Grammar.DESCRIPTOR.fields)


def check_grammar(message: pb.GenerateRequest, prompt: Prompt, model: ServedModel) -> OutputGrammar | None:
    """The grammar of a request's output; None: it has none. Raises ServiceError."""
    grammar = _sent(message, model)
    if grammar is None or not isinstance(prompt, ChatPrompt) or prompt.continues:
        return grammar
    return _in_whole_format(grammar, model)


def _in_whole_format(grammar: OutputGrammar, model: ServedModel) -> OutputGrammar:
    """The grammar of an output whose answer matches `grammar`, in the format of the model."""
    whole = model.whole_format
    if whole is None or whole.of_schema is None or whole.of_choices is None:
        return grammar
    match grammar.kind:
        case "json_schema":
            try:
                text = whole.of_schema(parse_object(grammar.text))
            except ValueError as error:
                raise invalid("grammar.json_schema", str(error)) from error
        case "choices":
            text = whole.of_choices(grammar.choices)
        case _:
            why = f"not in chats of a model that writes {whole.name}; json_schema and choices are"
            raise unsupported(f"grammar.{grammar.kind}", why)
    check_size(f"grammar.{grammar.kind}", len(text.encode()), model.max_grammar_bytes, "bytes as a grammar")
    return OutputGrammar("lark", text)


def _sent(message: pb.GenerateRequest, model: ServedModel) -> OutputGrammar | None:
    if not message.HasField("grammar"):
        return None
    if not model.max_grammar_bytes:
        raise unsupported("grammar")
    grammar = message.grammar
    check_size("grammar", grammar.ByteSize(), model.max_grammar_bytes, "bytes")
    kind = grammar.WhichOneof("grammar")
    if kind is None:
        raise invalid("grammar", f"one of {', '.join(_KINDS)}")
    if message.stop.ignore_eos:
        raise invalid("stop.ignore_eos", "not with a grammar: its text ends where the model says so")
    if kind == "choices":
        if not grammar.choices.choices:
            raise invalid("grammar.choices", "at least one")
        return OutputGrammar("choices", choices=tuple(grammar.choices.choices))
    text = getattr(grammar, kind)
    if not text:
        raise invalid(f"grammar.{kind}", "must not be empty")
    return OutputGrammar(kind, text)
