"""What a scheduler would answer, as a pure function of the request, continuations included."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

from paceline.scheduler.v1 import scheduler_pb2 as pb

PIECES = ("a", "bc ", "é", "日本", "🙂", "")  # the text of token ids, by id modulo their number
DIGEST, MODEL, SAMPLER = b"digest of the prompt", b"the model", "sampler-1"


def ids_of(seed: int, index: int, max_tokens: int) -> list[int]:
    """The whole output of one completion."""
    draw = random.Random(zlib.crc32(f"{seed} {index}".encode()))
    return [draw.randrange(1000) for _ in range(min(max_tokens, draw.randrange(1, 12)))]


def replies(
    request: pb.GenerateRequest, draw: random.Random, *, cached_tokens: int = 0
) -> Iterator[pb.GenerateResponse]:
    """A whole stream, cut into deltas as `draw` likes; the text lags one token behind the ids."""
    max_tokens = request.stop.max_tokens or 10
    had = {one.index: one for one in request.continuation.completions}
    if request.HasField("continuation"):
        told = request.continuation
        assert (told.prompt_digest, told.model_fingerprint, told.sampler) == (DIGEST, MODEL, SAMPLER)
        assert request.sampling.temperature == 0.5  # as Started resolved it
    yield pb.GenerateResponse(
        started=pb.Started(
            request_id=request.request_id,
            model="ideal",
            prompt_tokens=5,
            cached_tokens=cached_tokens,
            sampling=pb.SamplingParams(
                temperature=0.5, seed=request.sampling.seed, logprobs=request.sampling.logprobs
            ),
            max_tokens=max_tokens,
            prompt_digest=DIGEST,
            model_fingerprint=MODEL,
            sampler=SAMPLER,
            continued_tokens=sum(len(one.token_ids) for one in had.values()),
        )
    )
    streams = []
    for index in range(max(request.n, 1)):
        ids = ids_of(request.sampling.seed, index, max_tokens)
        one = had.get(index, pb.ContinuedCompletion())
        assert list(one.token_ids) == ids[: len(one.token_ids)]
        if not one.finished:
            streams.append(_completion(request, index, ids, len(one.token_ids), one.text_bytes, draw))
    while streams:
        stream = draw.choice(streams)
        message = next(stream, None)
        if message is None:
            streams.remove(stream)
        else:
            yield message


def _completion(
    request: pb.GenerateRequest, index: int, ids: list[int], at: int, text_bytes: int, draw: random.Random
) -> Iterator[pb.GenerateResponse]:
    text = [PIECES[id_ % len(PIECES)] for id_ in ids]
    if request.returns == pb.RETURNS_TOKEN_IDS:
        text = []
    while at < len(ids) or text_bytes < len("".join(text).encode()):
        to = min(len(ids), at + draw.randrange(1, 4))
        whole = "".join(text[: to if to == len(ids) else to - 1]).encode()
        delta = pb.Delta(token_ids=ids[at:to], text=whole[text_bytes:].decode(), elapsed_us=1000 * to)
        if request.sampling.logprobs:
            delta.logprobs.extend(pb.TokenLogprobs(logprob=-id_ / 8) for id_ in ids[at:to])
        at, text_bytes = to, len(whole)
        yield pb.GenerateResponse(index=index, delta=delta)
    usage = pb.Usage(prompt_tokens=5, completion_tokens=len(ids), first_token_ms=1, total_ms=len(ids))
    yield pb.GenerateResponse(
        index=index, finished=pb.Finished(reason=pb.FINISH_REASON_STOP, stop_string="END", usage=usage)
    )
