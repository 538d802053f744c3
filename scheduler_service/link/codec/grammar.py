"""A grammar as executors read it."""

from __future__ import annotations

from paceline.executor.v1 import executor_pb2 as pb

from scheduler_service.core.request import OutputGrammar


def encode_grammar(grammar: OutputGrammar) -> pb.Grammar:
    """The message of a grammar."""
    message = pb.Grammar(begins_after=grammar.begins_after)
    if grammar.kind == "choices":
        message.choices.choices.extend(grammar.choices)
        return message
    setattr(message, grammar.kind, grammar.text)
    return message
