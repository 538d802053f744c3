"""Checks GenerateRequest.continuation: the output of an interrupted stream that is resumed here."""

from __future__ import annotations

from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.core.request import Continued
from scheduler_service.errors import invalid, mismatch
from scheduler_service.model import Fingerprints, ServedAdapter, ServedModel
from scheduler_service.streams.continuation import Continuation, ReceivedText


def check_continuation(
    message: pb.Continuation,
    n: int,
    min_tokens: int,
    ends: frozenset[int],
    model: ServedModel,
    adapter: ServedAdapter | None = None,
) -> Continuation:
    """The continuation of a request for `n` completions; `ends` are the token ids that end a completion.

    Raises ServiceError; its reason is CONTINUATION if the output is of another model, adapter or sampler.
    """
    _check_fingerprints(message, model.fingerprints, adapter.fingerprint if adapter else b"")
    seen: set[int] = set()
    completions = []
    for at, one in enumerate(message.completions):
        field = f"continuation.completions[{at}]"
        if one.index >= n or one.index in seen:
            raise invalid(f"{field}.index", f"is {one.index}: each index below {n} at most once")
        seen.add(one.index)
        ids = tuple(one.token_ids)
        if len(ids) > model.context_length:
            raise invalid(f"{field}.token_ids", f"has {len(ids)} ids, the context {model.context_length}")
        if ids and max(ids) >= model.vocab_size:
            raise invalid(f"{field}.token_ids", f"has ids beyond the vocabulary of {model.vocab_size}")
        if any(id_ in ends for id_ in ids[min_tokens:-1]):
            raise invalid(f"{field}.token_ids", "goes on after a token that ended it")
        if len(one.argument_bytes) > len(ids):
            raise invalid(f"{field}.argument_bytes", "has more calls than there are tokens")
        completions.append(Continued(one.index, ids, one.finished))
    if len(completions) == n and all(one.finished for one in completions):
        raise invalid("continuation.completions", "all are finished: nothing is left to do")
    return Continuation(
        completions=tuple(completions),
        received=tuple(
            ReceivedText(one.text_bytes, one.reasoning_bytes, tuple(one.argument_bytes))
            for one in message.completions
        ),
        prompt_digest=message.prompt_digest,
    )


def _check_fingerprints(message: pb.Continuation, here: Fingerprints, adapter: bytes) -> None:
    for name, theirs, ours in (
        ("model_fingerprint", message.model_fingerprint, here.model),
        ("adapter_fingerprint", message.adapter_fingerprint, adapter),
        ("sampler", message.sampler, here.sampler),
    ):
        if theirs != ours:
            raise mismatch(f"continuation.{name}", "is another one here")
