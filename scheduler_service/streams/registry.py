"""The streams of all live requests; the core's events go through here to the streams."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from service_kit.identity import Identity

from scheduler_service.core.errors import AdmissionError
from scheduler_service.core.evaluation import Evaluation
from scheduler_service.core.events import CompletionEnded, Event, Failed, PromptScores, PromptVector, Tokens
from scheduler_service.core.request import Phases, Request
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.errors import ErrorReason, ServiceError, of_admission, of_failure
from scheduler_service.link.pool import Served
from scheduler_service.metrics.metrics import Telemetry
from scheduler_service.model import ServedAdapter, ServedModel
from scheduler_service.streams.access_log import CLIENT_LEFT, log_end
from scheduler_service.streams.evaluation import EvaluationCall, EvaluationStream
from scheduler_service.streams.output import OutputStart
from scheduler_service.streams.reading import behind_reasoning, chat_reading
from scheduler_service.streams.request import CheckedRequest, scoped_id
from scheduler_service.streams.stream import RequestStream, WakeQueue
from scheduler_service.traced_call import TracedCall, current_call

Clock = Callable[[], float]
LiveStream: TypeAlias = RequestStream | EvaluationStream
Checked: TypeAlias = CheckedRequest | EvaluationCall


class StreamRegistry:
    """Admits requests, passes the core's events to their streams, and ends requests.

    Not thread-safe: use it on the event loop only, like the core. `wake` is called when the loop should
    plan again; `clock` is time.monotonic, or a test's. Two callers may use the same request id at once.
    """

    def __init__(
        self, core: StepScheduler, metrics: Telemetry, clock: Clock, wake: Callable[[], None]
    ) -> None:
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._wake = wake
        self._streams: dict[str, LiveStream] = {}  # by the core's ids
        self._resendable: Counter[str] = Counter()  # those with an id of the client's own, by identity
        self._wake_queue = WakeQueue()
        self._posted: list[tuple[LiveStream, Event]] = []  # for the next `deliver`
        self.request_ended = asyncio.Event()  # set whenever one has ended, well or badly

    def __len__(self) -> int:
        return len(self._streams)

    def check(self, caller: Identity, checked: Checked, prompt_tokens: int, deadline: float | None) -> None:
        """Raises ServiceError if a request with `prompt_tokens` or more would not be admitted now.

        A resend needs no room of its own: it gets the earlier call's.
        """
        if self._replaced(caller, checked) is None:
            self.check_room(caller, prompt_tokens, deadline)

    def _replaced(self, caller: Identity, checked: Checked) -> LiveStream | None:
        """The stream that a resend replaces; None: the request is no resend.

        A resend has the id and the bytes of a stream of which the client was sent nothing. Raises
        ServiceError if another stream of the caller has the id.
        """
        stream = self._streams.get(scoped_id(caller.name, checked.id))
        if stream is not None and (stream.taken or not checked.digest or stream.digest != checked.digest):
            raise ServiceError(ErrorReason.DUPLICATE_REQUEST, f"request_id: {checked.id} is live")
        return stream

    def may_be_resent(self, caller: Identity) -> bool:
        """Whether a call of this caller may be a resend: it has a live request with an id of its own."""
        return self._resendable[caller.name] > 0

    def check_room(self, caller: Identity, prompt_tokens: int, deadline: float | None) -> None:
        """Raises ServiceError if a new request with `prompt_tokens` or more would not be admitted now."""
        now = self._clock()
        try:
            self._core.check_room(caller.name, now, prompt_tokens, deadline, caller.weight)
        except AdmissionError as error:
            raise of_admission(error) from error

    def admit(
        self,
        checked: CheckedRequest,
        prompt: Sequence[int],
        caller: Identity,
        *,
        arrival: float,
        deadline: float | None,
        served: Served,
        phases: Phases = (),
    ) -> RequestStream:
        """Queue a request; returns its stream. Raises ServiceError, and then nothing has changed."""
        replaced = self._replaced(caller, checked)
        vocabulary = None if served.text is None else served.text.vocabulary
        reading = None if vocabulary is None else chat_reading(checked, prompt, served.model, vocabulary)
        if reading is not None:
            checked = behind_reasoning(checked, reading, served.model)
        request = checked.to_core(prompt, caller, arrival=arrival, deadline=deadline, phases=phases)
        stream = RequestStream(
            checked, request.id, caller.name, arrival, vocabulary, self._wake_queue, reading
        )
        stream.model = served.model.name if checked.adapter is None else checked.adapter.name
        stream.prompt_tokens = len(prompt)
        stopped = []
        if checked.continuation is not None:
            checked.continuation.check_prompt(prompt)
            stopped = stream.continue_after(checked.continuation)
        stream.make_start = partial(self._start, request, served.model, checked.adapter)
        self._enter(stream, request, replaced)
        for index in stopped:
            self._stop(stream, index)
        return stream

    def admit_evaluation(
        self,
        call: EvaluationCall,
        evaluation: Evaluation,
        alternatives: int,
        caller: Identity,
        *,
        arrival: float,
        deadline: float | None,
        phases: Phases = (),
    ) -> EvaluationStream:
        """Queue an evaluation. Raises ServiceError, and then nothing has changed."""
        replaced = self._replaced(caller, call)
        request = call.to_core(
            evaluation, alternatives, caller, arrival=arrival, deadline=deadline, phases=phases
        )
        stream = EvaluationStream(call, request.id, caller.name, arrival, len(evaluation.inputs))
        stream.prompt_tokens = evaluation.tokens
        self._enter(stream, request, replaced)
        return stream

    def _enter(self, stream: LiveStream, request: Request, replaced: LiveStream | None) -> None:
        """Queue the stream's request in the core."""
        try:
            events = self._core.add(request, self._clock(), replaces=replaced is not None)
        except AdmissionError as error:
            raise of_admission(error) from error
        if (call := current_call()) is not None:
            stream.call, call.courses = call, self._core.courses(request.id)
        if replaced is not None:
            self._end(replaced, ServiceError(ErrorReason.REPLACED, "the same request was sent again"))
        self._streams[request.id] = stream
        self._resendable[stream.identity] += bool(stream.digest)
        self.post(events)
        self._wake()

    def _start(
        self, request: Request, model: ServedModel, adapter: ServedAdapter | None, stream: RequestStream
    ) -> OutputStart:
        max_tokens = self._core.max_tokens(request)
        return OutputStart(
            stream.request_id,
            request,
            model,
            adapter,
            max_tokens,
            stream.cached_tokens,
            stream.warnings,
            returns_prompt=stream.returns_prompt,
        )

    def post(self, events: Iterable[Event]) -> None:
        """Keep events for the next `deliver`, so that the next step can be sent first.

        Each event is kept with its stream: a later request of the same id must not get it.
        """
        streams = self._streams
        self._posted += [(stream, e) for e in events if (stream := streams.get(e.request_id)) is not None]

    def deliver(self) -> None:
        """Pass the posted events to their streams."""
        posted, self._posted = self._posted, []
        now = self._clock()
        gaps: dict[tuple[float, int], int] = {}  # of deltas, by seconds since the last and tokens
        for stream, event in posted:
            if self._streams.get(event.request_id) is not stream:
                continue  # it has ended, or another request has its id now
            match event:
                case Tokens() if isinstance(stream, RequestStream):
                    completion = stream.completions[event.index]
                    if completion.tokens_at is None:
                        self._metrics.first_token_s.observe(now - stream.arrival)
                    else:
                        gap = now - completion.tokens_at, len(event.ids)
                        gaps[gap] = gaps.get(gap, 0) + 1
                    completion.tokens_at = now
                    if event.cached_tokens is not None:
                        stream.cached_tokens = event.cached_tokens
                    if stream.push(event) is not None:
                        self._stop(stream, event.index)
                case PromptScores():
                    stream.push_scores(event)
                case PromptVector() if isinstance(stream, EvaluationStream):
                    stream.push_vector(event)
                case CompletionEnded():
                    self._finish(stream, event)
                case Failed():
                    self._end(stream, of_failure(event, stream.grammar_field))
        for (gap_s, tokens), times in gaps.items():
            self._metrics.inter_token_s.add(gap_s, times)
            self._metrics.token_s.add(gap_s / tokens, times * tokens)

    def traced_calls(self, core_ids: Iterable[str]) -> Iterator[TracedCall]:
        """Those of these requests whose spans are recorded."""
        found = (self._streams.get(one) for one in core_ids)
        return (one.call for one in found if one is not None and one.call is not None)

    def abort(self, request_id: str, identity: str, why: str) -> bool:
        """End an identity's request of this id; returns False if there is none."""
        stream = self._streams.get(scoped_id(identity, request_id))
        if stream is not None:
            self._cancel(stream, ServiceError(ErrorReason.ABORTED, why))
        return stream is not None

    def abort_all(self, request_id: str, why: str) -> bool:
        """End the requests of this id of all identities; returns False if there is none."""
        found = [stream for stream in self._streams.values() if stream.request_id == request_id]
        for stream in found:
            self._cancel(stream, ServiceError(ErrorReason.ABORTED, why))
        return bool(found)

    def close(self, stream: LiveStream) -> None:
        """End a stream's request: its reader takes no more output. To be called once, by the reader.

        After the stream's end it only writes the line of the access log.
        """
        left = self._streams.get(stream.core_id) is stream
        if left:
            self._cancel(stream, ServiceError(ErrorReason.ABORTED, "the client has left"))
        now = self._clock()
        log_end(stream, now, client_left=left)
        error = CLIENT_LEFT if left else "" if stream.error is None else stream.error.reason.name
        self._metrics.genai.ended(stream.operation, error, now - stream.arrival, stream.finished_here)

    def cancel_all(self, begun: ServiceError, unsent: ServiceError) -> None:
        """End all requests: with `begun` if the client was sent output, else with `unsent`."""
        for stream in list(self._streams.values()):
            self._cancel(stream, begun if stream.taken else unsent)

    def cancel_stalled(self, timeout_s: float) -> None:
        """End the requests whose client has not read the output that was written for `timeout_s` seconds."""
        now = self._clock()
        streams = [stream for stream in self._streams.values() if isinstance(stream, RequestStream)]
        stalled = [stream for stream in streams if stream.stalled_s(now) > timeout_s]
        for stream in stalled:
            why = f"nothing was read for {timeout_s:g} s"
            self._cancel(stream, ServiceError(ErrorReason.STALLED_READER, why))
            if stream.reader is not None:
                stream.reader.cancel()

    def _stop(self, stream: RequestStream, index: int) -> None:
        """End a completion whose text contains a stop string."""
        finished = self._core.stop(stream.core_id, index, self._clock())
        if finished is not None:
            self._finish(stream, finished)
            self._wake()

    def _cancel(self, stream: LiveStream, error: ServiceError) -> None:
        self._core.cancel(stream.core_id, self._clock(), error.message)
        self._end(stream, error)
        self._wake()

    def _finish(self, stream: LiveStream, event: CompletionEnded) -> None:
        stream.finish(event)
        self._metrics.finished(event.usage)
        if stream.ended:
            self._forget(stream)

    def _end(self, stream: LiveStream, error: ServiceError) -> None:
        stream.fail(error)
        self._forget(stream)

    def _forget(self, stream: LiveStream) -> None:
        del self._streams[stream.core_id]
        self.request_ended.set()
        if stream.digest:
            identity = stream.identity
            self._resendable[identity] -= 1
            if not self._resendable[identity]:
                del self._resendable[identity]
