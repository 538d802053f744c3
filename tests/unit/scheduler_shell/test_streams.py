"""Streams are ordered and gap-free, merge for slow readers, and end exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.service.identity import Identity

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.request import DraftingWish
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.step import Capacity, PlannedStep, RowAnswer, StepAnswer, TopLogprobs
from scheduler_service.errors import ErrorReason, ServiceError
from scheduler_service.link.pool import Served
from scheduler_service.metrics.metrics import Telemetry
from scheduler_service.model import DraftingOffer
from scheduler_service.rpc.codec.output import output_message
from scheduler_service.rpc.codec.requests import check_request
from scheduler_service.streams.completion import MAX_DELTA_TOKENS
from scheduler_service.streams.continuation import prompt_digest
from scheduler_service.streams.output import OutputStart
from scheduler_service.streams.registry import StreamRegistry
from scheduler_service.streams.request import CheckedRequest
from scheduler_service.streams.stream import RequestStream
from scheduler_service.text.job import TextLimits
from scheduler_service.text.pool import TextPool
from scheduler_service.text.tools import TextTools
from scheduler_service.text.vocabulary import Vocabulary
from scheduler_service.text.worker.pieces import pieces_of
from tests.support.untyped import present
from tests.support.work import bytecodes
from tests.unit.scheduler_shell import models_made_here
from tests.unit.scheduler_shell import tokenizers_made_here as made
from tests.unit.scheduler_shell.bad_ends import raises

MODEL = replace(models_made_here.MODEL, vocab_size=made.byte_level().get_vocab_size())
CAPACITY = Capacity(1000, 16, 64, 100, 100, 1000)
LETTERS = [present(made.byte_level().token_to_id(letter)) for letter in "abc"]


CALLER = Identity("ours", "token")


class Shop:
    """A core and its live requests, with a test in the executor's place and on the clock."""

    def __init__(self, config: CoreConfig | None = None) -> None:
        self.now = 0.0
        self.core = StepScheduler(config or CoreConfig())
        self.core.executor_ready(CAPACITY, 0.0)
        self.metrics = Telemetry()
        self.streams = StreamRegistry(self.core, self.metrics, lambda: self.now, lambda: None)
        vocabulary = Vocabulary(pieces_of(made.byte_level()))
        self.text = TextTools(TextPool(TextLimits()), vocabulary, has_chat_template=False)

    def admit(
        self,
        id_: str = "r",
        *,
        caller: Identity = CALLER,
        n: int = 1,
        text: bool = False,
        continued: pb.ContinuedCompletion | None = None,
        **stop: object,
    ) -> RequestStream:
        conditions = pb.StopConditions(**stop)  # type: ignore[arg-type]
        tokens = pb.TokenIds(ids=[1, 2])
        message = pb.GenerateRequest(request_id=id_, token_ids=tokens, stop=conditions, n=n)
        if continued is not None:
            message.sampling.seed = 1
            message.continuation.completions.append(continued)
            message.continuation.prompt_digest = prompt_digest([1, 2])
            message.continuation.model_fingerprint = MODEL.fingerprints.model
            message.continuation.sampler = MODEL.fingerprints.sampler
        checked = check_request(message, MODEL, DraftingOffer(default=DraftingWish()))
        served = Served(MODEL, self.text if text else None)
        return self.streams.admit(checked, [1, 2], caller, arrival=self.now, deadline=None, served=served)

    def step(self, tokens: Sequence[int] | None = None, *, deliver: bool = True) -> PlannedStep | None:
        """One step, in which each sampling row gets the next of `tokens` (7 without)."""
        plan = self.core.plan(self.now)
        if plan is None:
            return None
        feed = iter(tokens or ())
        rows = [RowAnswer(row.kv_length + max(1, len(row.tokens)), [next(feed, 7)]) for row in plan.rows] + [
            RowAnswer(len(opening.tokens), [next(feed, 7)]) for opening in plan.openings
        ]
        forks = [RowAnswer(fork.length) for fork in plan.forks]
        self.streams.post(self.core.apply(StepAnswer(plan.number, rows, forks, 900, 0), self.now))
        if deliver:
            self.streams.deliver()
        return plan


def checked(id_: str) -> CheckedRequest:
    """The request that `Shop.admit` makes of this id."""
    tokens, stop = pb.TokenIds(ids=[1, 2]), pb.StopConditions()
    message = pb.GenerateRequest(request_id=id_, token_ids=tokens, stop=stop, n=1)
    return check_request(message, MODEL, DraftingOffer(default=DraftingWish()))


async def read(stream: RequestStream) -> list[pb.GenerateResponse]:
    messages = []
    while batch := await take(stream):
        messages += batch
    return messages


async def take(stream: RequestStream) -> list[pb.GenerateResponse]:
    """What is new, without the message that begins a stream."""
    return [output_message(one) for one in await stream.take() if not isinstance(one, OutputStart)]


def text_of(messages: Sequence[pb.GenerateResponse]) -> str:
    return "".join(message.delta.text for message in messages)


async def test_a_reader_that_keeps_up_gets_each_token_and_one_end() -> None:
    shop = Shop()
    stream = shop.admit(max_tokens=3)
    seen = []
    for token in (11, 12, 13):
        shop.step([token])
        seen += await take(stream)
    assert [list(message.delta.token_ids) for message in seen] == [[11], [12], [13], []]
    end = seen[-1].finished
    assert end.reason == pb.FINISH_REASON_LENGTH
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (2, 3)
    assert await take(stream) == []
    assert len(shop.streams) == 0


async def test_a_slow_reader_gets_merged_deltas_and_misses_nothing() -> None:
    shop = Shop()
    stream = shop.admit(max_tokens=5)
    for token in range(11, 16):
        shop.step([token])
    messages = await read(stream)
    assert [list(message.delta.token_ids) for message in messages] == [[11, 12, 13, 14, 15], []]


async def test_each_pause_between_tokens_is_counted_even_if_deltas_are_merged() -> None:
    shop = Shop()
    for id_ in ("a", "b"):
        shop.admit(id_, max_tokens=4)
    for now in (1.0, 1.5, 2.0, 4.0):
        shop.now = now
        shop.step()
    value = shop.metrics.registry.get_sample_value
    name = "paceline_scheduler_inter_token_seconds"
    assert value(f"{name}_bucket", {"le": "0.5"}) == 4
    assert (value(f"{name}_count"), value(f"{name}_sum")) == (6, 6.0)
    assert value("paceline_scheduler_first_token_seconds_sum") == 2.0


async def test_a_delta_says_when_its_last_token_came() -> None:
    shop = Shop()
    stream = shop.admit(max_tokens=4)
    elapsed = []
    for steps in ((1.0,), (1.5, 2.25), (4.0,)):
        for shop.now in steps:
            shop.step()
        shop.now += 1.0  # read later than it came
        elapsed += [message.delta.elapsed_us for message in await take(stream) if message.HasField("delta")]
    assert elapsed == [1_000_000, 2_250_000, 4_000_000]


async def test_a_very_slow_readers_delta_is_cut_into_messages_of_bounded_size() -> None:
    shop = Shop()
    stream = shop.admit(max_tokens=8)
    completion = stream.completions[0]
    completion._ids = list(range(2 * MAX_DELTA_TOKENS + 1))
    completion._logprobs = [TopLogprobs(-1.0)] * len(completion._ids)
    messages = [output_message(one) for one in completion.take(0.0)]
    assert [len(message.delta.token_ids) for message in messages] == [MAX_DELTA_TOKENS] * 2 + [1]
    assert [len(message.delta.logprobs) for message in messages] == [MAX_DELTA_TOKENS] * 2 + [1]


async def test_completions_of_one_request_end_one_by_one() -> None:
    shop = Shop()
    stream = shop.admit(n=3, max_tokens=2)
    while shop.step() is not None:
        pass
    messages = await read(stream)
    for index in range(3):
        own = [message for message in messages if message.index == index]
        assert sum(len(message.delta.token_ids) for message in own) == 2
        assert [message.WhichOneof("event") for message in own].count("finished") == 1
        assert own[-1].HasField("finished")


@given(st.lists(st.sampled_from(LETTERS), min_size=1, max_size=12), st.lists(st.booleans(), max_size=12))
def test_a_stop_string_ends_the_text_before_it_however_it_is_read(ids: list[int], reads: list[bool]) -> None:
    async def scenario() -> None:
        shop = Shop()
        stream = shop.admit(text=True, strings=["abc", "ca"], max_tokens=len(ids))
        whole = "".join("abc"[LETTERS.index(id_)] for id_ in ids)
        messages: list[pb.GenerateResponse] = []
        for step, id_ in enumerate(ids):
            if shop.step([id_]) is None:
                break
            if step < len(reads) and reads[step] and stream._changed:
                messages += await take(stream)
        messages += await read(stream)
        ends = {stop: whole.find(stop) + len(stop) for stop in ("abc", "ca") if stop in whole}
        finished = messages[-1].finished
        if ends:
            stop = min(ends, key=lambda one: ends[one])
            assert text_of(messages) == whole[: ends[stop] - len(stop)]
            assert (finished.reason, finished.stop_string) == (pb.FINISH_REASON_STOP, stop)
        else:
            assert text_of(messages) == whole
            assert (finished.reason, finished.WhichOneof("matched")) == (pb.FINISH_REASON_LENGTH, None)
        assert len(shop.streams) == 0
        shop.core.check_integrity()

    asyncio.run(scenario())


async def test_the_token_that_ends_a_completion_is_told_but_is_no_text() -> None:
    shop = Shop()
    stream = shop.admit(text=True, token_ids=[LETTERS[2]], max_tokens=9)
    for id_ in LETTERS:
        shop.step([id_])
    messages = await read(stream)
    assert text_of(messages) == "ab"
    assert [id_ for message in messages for id_ in message.delta.token_ids] == LETTERS
    assert messages[-1].finished.stop_token_id == LETTERS[2]


async def test_an_unfinished_character_is_sent_at_the_end() -> None:
    shop = Shop()
    stream = shop.admit(text=True, max_tokens=2)
    half = [present(made.byte_level().token_to_id(piece)) for piece in "ðŁ"]
    shop.step(half[:1])
    shop.step(half[1:])
    assert text_of(await read(stream)) == "�"


@pytest.mark.parametrize(("had", "rest"), [(0, "ab�"), (2, "�"), (2 + len("�".encode()), "")])
async def test_a_stream_cut_just_before_its_end_continues_after_the_text_that_was_held_back(
    had: int, rest: str
) -> None:
    ids = [*LETTERS[:2], present(made.byte_level().token_to_id("ð"))]
    shop = Shop()
    continued = pb.ContinuedCompletion(token_ids=ids, text_bytes=had)
    stream = shop.admit(text=True, max_tokens=3, strings=["bz"], continued=continued)
    shop.streams.deliver()
    messages = await read(stream)
    assert (text_of(messages), messages[-1].finished.reason) == (rest, pb.FINISH_REASON_LENGTH)


@pytest.mark.parametrize(("had", "rest"), [(1, "b"), (2, "")])
async def test_a_stream_cut_just_before_its_end_had_the_beginning_of_a_stop_string(
    had: int, rest: str
) -> None:
    shop = Shop()
    continued = pb.ContinuedCompletion(token_ids=LETTERS[:2], text_bytes=had)
    stream = shop.admit(text=True, max_tokens=2, strings=["bz"], continued=continued)
    shop.streams.deliver()
    messages = await read(stream)
    assert (text_of(messages), messages[-1].finished.reason) == (rest, pb.FINISH_REASON_LENGTH)


async def test_a_cancelled_request_ends_with_its_error_after_what_was_delivered() -> None:
    shop = Shop()
    stream = shop.admit(max_tokens=9)
    shop.step([11])
    assert shop.streams.abort("r", "ours", "aborted")
    assert [list(message.delta.token_ids) for message in await take(stream)] == [[11]]
    with raises(ErrorReason.ABORTED):
        await take(stream)
    assert not shop.streams.abort("r", "ours", "again")
    plan = shop.core.plan(shop.now)
    assert plan is not None  # nothing but the release of its cache
    assert (plan.releases, plan.rows, plan.openings) != ((), (), ())
    assert (plan.rows, plan.openings) == ((), ())


async def test_a_reused_id_gets_no_output_of_the_earlier_request() -> None:
    shop = Shop()
    shop.admit()
    shop.step([11], deliver=False)
    shop.streams.abort("r", "ours", "aborted")
    second = shop.admit()
    shop.streams.deliver()
    assert not second._changed
    with raises(ErrorReason.DUPLICATE_REQUEST):
        shop.admit(n=2)


async def test_a_resend_of_the_same_bytes_replaces_a_request_that_was_sent_nothing() -> None:
    shop = Shop()
    first = shop.admit(max_tokens=2)
    shop.step([11])
    second = shop.admit(max_tokens=2)
    with raises(ErrorReason.REPLACED):
        await read(first)
    shop.step([12])
    shop.step([13])
    assert [list(message.delta.token_ids) for message in await read(second)] == [[12, 13], []]
    assert len(shop.streams) == 0


async def test_a_resend_that_is_refused_leaves_the_request_before_it_alone() -> None:
    shop = Shop(CoreConfig(max_queued_requests=1))
    first = shop.admit(max_tokens=2)
    shop.step([11])
    shop.admit("other")
    with raises(ErrorReason.QUEUE_FULL):
        shop.admit(max_tokens=2)
    shop.step([12])
    assert [list(message.delta.token_ids) for message in await read(first)] == [[11, 12], []]


async def test_a_resend_has_the_room_of_the_request_that_it_replaces() -> None:
    shop = Shop(CoreConfig(max_queued_requests=1))
    first = shop.admit()
    shop.streams.check(CALLER, checked("r"), 2, None)
    second = shop.admit()
    with raises(ErrorReason.REPLACED):
        await read(first)
    with raises(ErrorReason.QUEUE_FULL):
        shop.streams.check(CALLER, checked("another"), 2, None)
    shop.step([11])
    assert [list(message.delta.token_ids) for message in await take(second)] == [[11]]


async def test_a_resend_does_not_replace_a_request_that_was_sent_something() -> None:
    shop = Shop()
    first = shop.admit(max_tokens=2)
    shop.step([11])
    await take(first)
    with raises(ErrorReason.DUPLICATE_REQUEST):
        shop.admit(max_tokens=2)


async def test_a_stream_begins_with_what_is_needed_to_continue_it() -> None:
    shop = Shop()
    stream = shop.admit(max_tokens=2)
    shop.step([11])
    first, *_ = map(output_message, await stream.take())
    started = first.started
    assert (started.request_id, started.model, started.prompt_tokens) == ("r", "small", 2)
    assert (started.max_tokens, started.continued_tokens) == (2, 0)
    assert started.prompt_digest == prompt_digest([1, 2])
    assert (started.model_fingerprint, started.sampler) == (b"model", "sampler-1")
    resolved = {field.name for field, _ in started.sampling.ListFields()}
    assert resolved >= {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"}
    shop.step([12])
    assert not any(isinstance(one, OutputStart) for one in await stream.take())


async def test_an_id_is_taken_until_its_end_is_delivered() -> None:
    shop = Shop()
    shop.admit(max_tokens=1)
    shop.step(deliver=False)
    assert not shop.core.live("ours r")
    with raises(ErrorReason.DUPLICATE_REQUEST):
        shop.admit()


async def test_a_reader_that_leaves_ends_its_request_and_no_other() -> None:
    shop = Shop()
    stream, other = shop.admit("a"), shop.admit("b")
    shop.step()
    shop.streams.close(stream)
    shop.streams.close(stream)
    assert not shop.core.live("ours a")
    assert shop.core.live("ours b")
    assert not other.ended


async def test_a_reader_that_stalls_is_ended_with_the_reason() -> None:
    shop = Shop()
    stream, waiting = shop.admit("stalled"), shop.admit("waiting")
    shop.step()
    await take(stream)  # and never again
    await take(waiting)
    taking = asyncio.create_task(waiting.take())  # waits for more: this one is no slow reader
    await asyncio.sleep(0)
    shop.now = stream._taken_at + 31.0  # type: ignore[operator]
    shop.streams.cancel_stalled(30.0)
    with raises(ErrorReason.STALLED_READER):
        await take(stream)
    assert shop.core.live("ours waiting")
    taking.cancel()


async def test_two_callers_may_use_one_id_and_each_aborts_only_its_own() -> None:
    shop, other = Shop(), Identity("theirs", "token")
    mine, theirs = shop.admit("r"), shop.admit("r", caller=other)
    assert not shop.streams.abort("unknown", "theirs", "")
    assert not shop.streams.abort("r", "third", "")
    assert shop.streams.abort("r", "theirs", "")
    assert theirs.ended
    assert not mine.ended
    shop.step([11])
    messages = [output_message(one) for one in await mine.take()]
    assert messages[0].started.request_id == "r"  # as the client named it
    assert [list(message.delta.token_ids) for message in messages[1:]] == [[11]]


async def test_an_administrator_aborts_the_requests_of_all_identities() -> None:
    shop = Shop()
    streams = [shop.admit("r"), shop.admit("r", caller=Identity("theirs", "token"))]
    other = shop.admit("s")
    assert shop.streams.abort_all("r", "")
    assert all(stream.ended for stream in streams)
    assert not other.ended
    assert not shop.streams.abort_all("r", "")


def work_to_end_all(requests: int) -> int:
    """Bytecodes of ending so many requests at once, each of which has a token that was not delivered yet."""
    shop = Shop()
    for number in range(requests):
        shop.admit(f"r{number}")
    shop.step(deliver=False)
    work = bytecodes(
        lambda: shop.streams.cancel_all(
            ServiceError(ErrorReason.ABORTED, "all"), ServiceError(ErrorReason.ABORTED, "all")
        )
    )
    assert not len(shop.streams)
    return work


async def test_ending_all_requests_costs_each_of_them_the_same_however_many_there_are() -> None:
    assert work_to_end_all(96) < 1.2 * 8 * work_to_end_all(12)
