"""Encodes a stream's output as GenerateResponse or GenerateUnaryResponse."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.chat.events import CallPiece
from scheduler_service.core.events import EndReason
from scheduler_service.core.step import TopLogprobs
from scheduler_service.rpc.codec.scores import prompt_logprobs
from scheduler_service.rpc.codec.waits import wait_times
from scheduler_service.streams.continuation import prompt_digest
from scheduler_service.streams.output import Output, OutputDelta, OutputEnd, OutputStart, PromptOutput


def output_message(output: Output) -> pb.GenerateResponse:
    """One output as a message of the stream."""
    if isinstance(output, OutputDelta):
        response = pb.GenerateResponse()
        if output.index:
            response.index = output.index
        delta = response.delta  # filled in place: copying it into its response would cost as much again
        delta.token_ids.extend(output.ids)
        delta.text = output.text
        delta.elapsed_us = round(1e6 * output.elapsed_s)
        if output.logprobs:
            delta.logprobs.extend(_logprobs(output.logprobs))
        if output.reasoning:
            delta.reasoning = output.reasoning
        for call in output.calls:
            delta.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
        return response
    if isinstance(output, OutputEnd):
        return pb.GenerateResponse(index=output.index, finished=_finished(output))
    if isinstance(output, PromptOutput):
        return pb.GenerateResponse(prompt_logprobs=prompt_logprobs(output.scores))
    return pb.GenerateResponse(started=_started(output))


def _logprobs(logprobs: Iterable[TopLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(logprob=one.logprob, top_ids=one.top_ids, top_logprobs=one.top_logprobs)
        for one in logprobs
    ]


def _started(start: OutputStart) -> pb.Started:
    request, model = start.request, start.model
    sampling = request.sampling
    return pb.Started(
        request_id=start.request_id,
        model=model.name if start.adapter is None else start.adapter.name,
        prompt_tokens=len(request.prompt),
        cached_tokens=start.cached_tokens,
        sampling=pb.SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=dict(sampling.logit_bias),
            seed=sampling.seed,
            logprobs=sampling.logprobs,
        ),
        max_tokens=start.max_tokens,
        prompt_digest=prompt_digest(request.prompt),
        model_fingerprint=model.fingerprints.model,
        sampler=model.fingerprints.sampler,
        continued_tokens=sum(len(one.ids) for one in request.continued),
        adapter_fingerprint=request.adapter,
        warnings=start.warnings,
        prompt_token_ids=request.prompt if start.returns_prompt else (),
    )


def _finished(end: OutputEnd) -> pb.Finished:
    """The end of a completion. A stop string counts before the core's reason: there may be both."""
    ended, stop_string = end.finished, end.stop_string
    usage = ended.usage
    message = pb.Finished(
        reason=(
            pb.FINISH_REASON_LENGTH
            if ended.reason is EndReason.LENGTH and stop_string is None
            else pb.FINISH_REASON_STOP
        ),
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            drafted_tokens=usage.drafted_tokens,
            accepted_tokens=usage.accepted_tokens,
            preemptions=usage.preemptions,
            queue_ms=_ms(usage.queue_s),
            first_token_ms=_ms(usage.first_token_s),
            total_ms=_ms(usage.total_s),
            verifications=usage.verifications,
            drafted_by_position=usage.drafted_by_position,
            accepted_by_position=usage.accepted_by_position,
            reasoning_tokens=end.reasoning_tokens,
            grammar_drafted_tokens=usage.grammar_drafted_tokens,
            grammar_accepted_tokens=usage.grammar_accepted_tokens,
            queue_waits=wait_times(usage.queue_waits),
            preempted_waits=wait_times(usage.preempted_waits),
        ),
    )
    if stop_string is not None:
        message.stop_string = stop_string
    elif ended.matched_id is not None and ended.reason is EndReason.EOS:
        message.eos_token_id = ended.matched_id
    elif ended.matched_id is not None:
        message.stop_token_id = ended.matched_id
    return message


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))


class UnaryAnswer:
    """A stream's output, collected into one response."""

    def __init__(self, request_id: str) -> None:
        self._response = pb.GenerateUnaryResponse(request_id=request_id)
        self._completions: dict[int, pb.Completion] = {}
        self._texts: dict[tuple[str, int], list[str]] = {}
        self._calls: dict[int, dict[int, list[CallPiece]]] = {}  # pieces by completion and call

    def add(self, outputs: Iterable[Output]) -> None:
        """Append outputs of the stream."""
        for output in outputs:
            if isinstance(output, OutputStart):
                self._response.warnings.extend(output.warnings)
                if output.returns_prompt:
                    self._response.prompt_token_ids.extend(output.request.prompt)
                continue
            if isinstance(output, PromptOutput):
                continue
            index = output.index
            completion = self._completions.setdefault(index, pb.Completion(index=index))
            if isinstance(output, OutputEnd):
                completion.finished.CopyFrom(_finished(output))
            else:
                completion.token_ids.extend(output.ids)
                completion.logprobs.extend(_logprobs(output.logprobs))
                self._texts.setdefault(("text", index), []).append(output.text)
                self._texts.setdefault(("reasoning", index), []).append(output.reasoning)
                for piece in output.calls:
                    self._calls.setdefault(index, {}).setdefault(piece.index, []).append(piece)

    def response(self) -> pb.GenerateUnaryResponse:
        """The response, with all completions in the order of their indices."""
        for index, completion in sorted(self._completions.items()):
            completion.text = "".join(self._texts.get(("text", index), ()))
            completion.reasoning = "".join(self._texts.get(("reasoning", index), ()))
            for pieces in self._calls.get(index, {}).values():
                arguments = "".join(piece.arguments for piece in pieces)
                completion.tool_calls.add(id=pieces[0].id, name=pieces[0].name, arguments=arguments)
            self._response.completions.append(completion)
        return self._response
