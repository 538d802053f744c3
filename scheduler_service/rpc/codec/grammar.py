"""Checks GenerateRequest.grammar, as far as that takes no compiling."""

from __future__ import annotations

from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.core.request import OutputGrammar
from scheduler_service.errors import invalid, unsupported
from scheduler_service.model import ServedModel
from scheduler_service.rpc.codec.checks import check_size

_KINDS = tuple(field.name for field in pb.Grammar.DESCRIPTOR.fields)


def check_grammar(message: pb.GenerateRequest, model: ServedModel) -> OutputGrammar | None:
    """The grammar of a request; None: it has none. Raises ServiceError."""
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
