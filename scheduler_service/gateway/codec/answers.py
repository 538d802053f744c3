"""Encodes a stream's output as GenerateResponse of the worker protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as worker_pb

from scheduler_service.core.events import EndReason
from scheduler_service.core.step import TopLogprobs
from scheduler_service.streams.output import Output, OutputDelta, OutputEnd, OutputStart


class WorkerAnswer:
    """The messages of one request: with `streams` a chunk for each delta, and in any case one end of each
    completion, which has all of its tokens.
    """

    def __init__(self, *, streams: bool) -> None:
        self._streams = streams
        self._prompt_tokens = self._cached_tokens = 0
        self._ids: dict[int, list[int]] = {}  # by completion
        self._logprobs: dict[int, list[TopLogprobs]] = {}  # the same; none unless they were asked for

    def messages(self, outputs: Iterable[Output]) -> Iterator[worker_pb.GenerateResponse]:
        """The next messages. Text, reasoning and calls are left to the gateway, which decodes token ids."""
        for output in outputs:
            if isinstance(output, OutputDelta):
                self._ids.setdefault(output.index, []).extend(output.ids)
                if output.logprobs:
                    self._logprobs.setdefault(output.index, []).extend(output.logprobs)
                if self._streams and output.ids:
                    yield self._chunk(output)
            elif isinstance(output, OutputEnd):
                yield self._complete(output)
            elif isinstance(output, OutputStart):
                self._prompt_tokens = len(output.request.prompt)
                self._cached_tokens = output.cached_tokens

    def _chunk(self, delta: OutputDelta) -> worker_pb.GenerateResponse:
        response = worker_pb.GenerateResponse()
        chunk = response.chunk  # filled in place: copying it into its response would cost as much again
        chunk.token_ids.extend(delta.ids)
        chunk.prompt_tokens = self._prompt_tokens
        chunk.completion_tokens = len(delta.ids)  # of this chunk alone
        chunk.cached_tokens = self._cached_tokens
        chunk.index = delta.index
        if delta.logprobs:
            _set_logprobs(chunk.output_logprobs, delta.ids, delta.logprobs)
        return response

    def _complete(self, end: OutputEnd) -> worker_pb.GenerateResponse:
        ended, index = end.finished, end.index
        ids = self._ids.pop(index, [])
        response = worker_pb.GenerateResponse()
        complete = response.complete
        complete.output_ids.extend(ids)
        is_length = ended.reason is EndReason.LENGTH and end.stop_string is None
        complete.finish_reason = "length" if is_length else "stop"
        complete.prompt_tokens = self._prompt_tokens
        complete.completion_tokens = ended.usage.completion_tokens
        complete.cached_tokens = self._cached_tokens
        complete.index = index
        complete.spec_draft_tokens = ended.usage.drafted_tokens
        complete.spec_accepted_tokens = ended.usage.accepted_tokens
        if end.stop_string is not None:
            complete.matched_stop_str = end.stop_string
        elif ended.reason is EndReason.STOP_TOKEN and ended.matched_id is not None:
            complete.matched_token_id = ended.matched_id
        if logprobs := self._logprobs.pop(index, None):
            _set_logprobs(complete.output_logprobs, ids, logprobs)
        return response


def _set_logprobs(
    message: worker_pb.OutputLogProbs, ids: Sequence[int], logprobs: Sequence[TopLogprobs]
) -> None:
    message.token_ids.extend(ids)
    message.token_logprobs.extend(one.logprob for one in logprobs)
    for one in logprobs:
        message.top_logprobs.add(values=one.top_logprobs, token_ids=one.top_ids)
