"""A grammar as executors read it."""

from __future__ import annotations

from paceline.executor.v1 import executor_pb2 as pb

from scheduler_service.core.request import OutputGrammar


def encode_grammar(grammar: OutputGrammar) -> pb.Grammar:
    """The message of a grammar."""
    if grammar.kind == "choices":
        return pb.Grammar(choices=pb.GrammarChoices(choices=grammar.choices))
    message = pb.Grammar()
    setattr(message, grammar.kind, grammar.text)
    return message
