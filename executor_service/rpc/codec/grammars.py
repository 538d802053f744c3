"""Grammars of openings and forks: found in a step, checked against the limits, and given to their samplings.

They are compiled between the two, off the event loop (`runtime/grammars.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from paceline.executor.v1 import executor_pb2 as pb

from executor_service.contract.grammar import Grammar
from executor_service.contract.limits import Limits
from executor_service.contract.plan import Reason, Refusal
from executor_service.grammar.source import GrammarKind, GrammarSource
from executor_service.rpc.codec.refusals import invalid, too_large, unsupported

CompiledGrammars = Mapping[GrammarSource, Grammar | str]
"""What became of the grammars of a request: compiled, or why not."""

NO_GRAMMARS: CompiledGrammars = {}

_KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)


def decode_grammar(field: str, grammar: pb.Grammar, limits: Limits) -> GrammarSource | Refusal:
    """A grammar before it is compiled."""
    if not limits.max_grammar_bytes:
        return unsupported(field)
    if (size := grammar.ByteSize()) > limits.max_grammar_bytes:
        return too_large(f"{field}: at most {limits.max_grammar_bytes} bytes (max_grammar_bytes), has {size}")
    begins_after = grammar.begins_after if grammar.HasField("begins_after") else None
    if begins_after is not None and begins_after >= limits.vocab_size:
        return invalid(f"{field}.begins_after: ids below {limits.vocab_size}, has {begins_after}")
    kind = grammar.WhichOneof("grammar")
    if kind is None:
        return invalid(f"{field}: one of {', '.join(_KINDS)}")
    if kind == "choices":
        if not grammar.choices.choices:
            return invalid(f"{field}.choices: at least one")
        choices = tuple(grammar.choices.choices)
        return GrammarSource("choices", choices=choices, begins_after=begins_after)
    text = getattr(grammar, kind)
    if not text:
        return invalid(f"{field}.{kind}: must not be empty")
    return GrammarSource(kind, text, begins_after=begins_after)


def sources_of(request: pb.Step | pb.Fork, limits: Limits) -> list[GrammarSource]:
    """The grammars of a step or a fork that are worth compiling."""
    samplings: list[pb.Sampling] = []
    if isinstance(request, pb.Fork):
        samplings.append(request.sampling)
    elif request.openings or request.ops:
        samplings += [opening.sampling for opening in request.openings]
        samplings += [op.fork.sampling for op in request.ops if op.HasField("fork")]
    decoded = [decode_grammar("", s.grammar, limits) for s in samplings if s.HasField("grammar")]
    return [source for source in decoded if isinstance(source, GrammarSource)]


def compiled_grammar(
    field: str, grammar: pb.Grammar, limits: Limits, compiled: CompiledGrammars
) -> Grammar | Refusal:
    """The compiled grammar of a message, or its refusal.

    `compiled` has an entry for each source that `sources_of` finds in the request; a text says why a source
    could not be compiled.
    """
    source = decode_grammar(field, grammar, limits)
    if isinstance(source, Refusal):
        return source
    found = compiled[source]
    return Refusal(Reason.GRAMMAR, f"{field}.{source.kind}: {found}") if isinstance(found, str) else found
