"""Tokenize, GetVocabulary and the prompt's ids, as a client of another language sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import grpc
import paceline
import paceline.aio
import pytest
from paceline.errors import InternalError
from paceline.pieces import Vocabulary
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc

from tests.integration.scheduler.test_chat_output import MARKERS, tokenizer
from tests.support.doctored_executor import doctored_stack
from tests.support.stack import Stack
from tests.unit.scheduler_shell.tool_styles import QWEN

HELLO = pb.Messages(messages=[pb.Message(role="user", content="hé")])


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    with doctored_stack(directory, chat_template=QWEN, tokenizer_json=tokenizer()) as stack:
        yield stack


@pytest.fixture
async def stub(stack: Stack) -> AsyncIterator[rpc.SchedulerServiceAsyncStub]:
    async with grpc.aio.insecure_channel(stack.scheduler.address) as channel:
        yield rpc.SchedulerServiceStub(channel)


async def vocabulary(stub: rpc.SchedulerServiceAsyncStub) -> tuple[bytes, list[bytes]]:
    tokens: list[bytes] = []
    while True:
        reply = await stub.GetVocabulary(pb.GetVocabularyRequest(first_id=len(tokens)))
        tokens += reply.tokens
        if reply.next_id == 0:
            return reply.fingerprint, tokens
        assert reply.next_id == len(tokens)


async def test_the_vocabulary_has_the_bytes_of_each_token_and_the_text_of_control_tokens(
    stub: rpc.SchedulerServiceAsyncStub,
) -> None:
    info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    fingerprint, tokens = await vocabulary(stub)
    assert fingerprint == info.vocabulary_fingerprint != b""
    assert len(tokens) == info.vocab_size
    assert tokens[0x61] == b"a"
    assert tokens[0xC3] == b"\xc3"
    assert [tokens[id_].decode() for id_ in MARKERS] == list(MARKERS.values())


async def test_who_knows_the_vocabulary_gets_no_tokens(stub: rpc.SchedulerServiceAsyncStub) -> None:
    fingerprint, _ = await vocabulary(stub)
    reply = await stub.GetVocabulary(pb.GetVocabularyRequest(known_fingerprint=fingerprint))
    assert (reply.fingerprint, list(reply.tokens), reply.next_id) == (fingerprint, [], 0)


async def test_an_id_that_no_token_has_is_refused(stub: rpc.SchedulerServiceAsyncStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetVocabulary(pb.GetVocabularyRequest(first_id=1 << 30))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "first_id" in (caught.value.details() or "")


async def test_the_tokens_bytes_are_the_texts_bytes(stub: rpc.SchedulerServiceAsyncStub) -> None:
    reply = await stub.Tokenize(pb.TokenizeRequest(text="hé</think>", return_tokens=True))
    assert list(reply.tokens) == [b"h", b"\xc3", b"\xa9", b"</think>"]
    assert len(reply.tokens) == len(reply.token_ids)
    assert not (await stub.Tokenize(pb.TokenizeRequest(text="hé"))).tokens


async def test_special_tokens_of_messages_are_the_templates(stub: rpc.SchedulerServiceAsyncStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(pb.TokenizeRequest(messages=HELLO, add_special_tokens=False))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    without = await stub.Tokenize(pb.TokenizeRequest(text="hé", add_special_tokens=False))
    assert without.token_ids == (await stub.Tokenize(pb.TokenizeRequest(text="hé"))).token_ids


async def test_the_prompts_ids_come_once_and_are_those_of_tokenize(
    stub: rpc.SchedulerServiceAsyncStub,
) -> None:
    request = pb.GenerateRequest(messages=HELLO, n=2, return_prompt_token_ids=True)
    request.stop.max_tokens = 3
    expected = (await stub.Tokenize(pb.TokenizeRequest(messages=HELLO))).token_ids
    events = [event async for event in stub.Generate(request)]
    started = [event.started for event in events if event.HasField("started")]
    assert [one.prompt_token_ids for one in started] == [expected]
    unary = await stub.GenerateUnary(pb.GenerateUnaryRequest(request=request))
    assert unary.prompt_token_ids == expected
    request.return_prompt_token_ids = False
    assert not (await stub.GenerateUnary(pb.GenerateUnaryRequest(request=request))).prompt_token_ids


async def test_a_prompt_without_an_opening_ends_behind_the_last_message(
    stub: rpc.SchedulerServiceAsyncStub,
) -> None:
    whole = (await stub.Tokenize(pb.TokenizeRequest(messages=HELLO, return_tokens=True))).tokens
    bare = pb.Messages(messages=HELLO.messages, omit_opening=True)
    short = (await stub.Tokenize(pb.TokenizeRequest(messages=bare, return_tokens=True))).tokens
    assert whole[: len(short)] == short
    assert b"".join(whole[len(short) :]).startswith(b"<|im_start|>assistant")
    bare.continue_final_message = True
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(pb.TokenizeRequest(messages=bare))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "omit_opening" in (caught.value.details() or "")


async def test_labels_are_in_the_log_of_the_call_alone(
    stub: rpc.SchedulerServiceAsyncStub, stack: Stack
) -> None:
    request = pb.GenerateRequest(text="x", labels={"team": "search\n\x1b[31m"})
    request.stop.max_tokens = 1
    await stub.GenerateUnary(pb.GenerateUnaryRequest(request=request))
    [line] = [line for line in stack.scheduler.log.splitlines() if "search" in line]
    assert "\x1b" not in line


async def test_the_sdk_collects_the_vocabulary_and_sends_the_new_options(
    stub: rpc.SchedulerServiceAsyncStub, stack: Stack
) -> None:
    fingerprint, tokens = await vocabulary(stub)
    assert fingerprint
    async with paceline.aio.Client(stack.scheduler.address) as client:
        assert await client.vocabulary() == tuple(tokens)
        bare = await client.tokenize("h", add_special_tokens=False)
        assert bare == [0x68]
        async with client.generate(
            messages=[{"role": "user", "content": "h"}],
            return_prompt_token_ids=True,
            omit_opening=True,
            labels={"team": "docs"},
            max_tokens=1,
        ) as stream:
            async for _ in stream:
                pass
            assert stream.started is not None
            prompt = bytes(id_ for id_ in stream.started.prompt_token_ids if id_ < 128).decode()
    assert "assistant" not in prompt
    with paceline.Client(stack.scheduler.address) as blocking:
        assert blocking.vocabulary() == tuple(tokens)
        with pytest.raises(TypeError, match="labels must be a mapping of strings to strings"):
            blocking.complete("x", labels={"team": 5})  # type: ignore[dict-item]


def test_a_vocabulary_that_does_not_go_on_is_an_error_and_another_one_begins_anew() -> None:
    pieces = Vocabulary()
    pieces.add(pb.GetVocabularyResponse(fingerprint=b"a", tokens=[b"x", b"y"], next_id=2))
    pieces.add(pb.GetVocabularyResponse(fingerprint=b"b", tokens=[b"z"], next_id=0))
    assert (pieces.tokens, pieces.is_complete) == ([], False)
    pieces.add(pb.GetVocabularyResponse(fingerprint=b"b", tokens=[b"z"], next_id=0))
    assert (pieces.tokens, pieces.is_complete) == ([b"z"], True)
    for next_id, some in ((7, [b"x"]), (1, [])):
        with pytest.raises(InternalError):
            Vocabulary().add(pb.GetVocabularyResponse(fingerprint=b"a", tokens=some, next_id=next_id))
