"""Both executor clients, call by call, on a live oracle."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from paceline import ExecutorClient, Session, aio, errors
from paceline.executor.v1 import executor_pb2 as pb

from tests.support.processes import ServiceProcess, running

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    arguments = ["--backend", "oracle", "--page-size", "4"]
    with running("executor_service", arguments, tmp_path_factory.mktemp("executor")) as process:
        yield process


def opening(cache_id: int) -> pb.Opening:
    return pb.Opening(cache_id=cache_id, tokens=PROMPT, sampling=pb.Sampling(seed=1))


def row(cache_id: int, kv_length: int, **more: Any) -> pb.Rows:
    return pb.Rows(cache_ids=[cache_id], kv_lengths=[kv_length], **more)


async def solo(client: aio.ExecutorClient, count: int) -> list[int]:
    """What the prompt continues with, one call after the other."""
    async with client.session() as session:
        result = await client.prefill(session.step(openings=[opening(1)]))
        tokens = list(result.rows.tokens)
        while len(tokens) < count:
            result = await client.decode(session.step(rows=row(1, result.rows.kv_lengths[0])))
            tokens += result.rows.tokens
    return tokens


async def test_steps_ahead_on_a_stream_give_what_single_calls_give(executor: ServiceProcess) -> None:
    async with aio.ExecutorClient(executor.address) as client:
        expected = await solo(client, 4)
        async with client.session() as session, client.stream(timeout_s=20) as stream:
            await stream.send(session.step(openings=[opening(1)]))
            for ahead in range(3):
                await stream.send(session.step(rows=row(1, len(PROMPT) + ahead)))
            results = [await stream.recv() for _ in range(4)]
        assert [token for result in results for token in result.rows.tokens] == expected
        assert [result.step_id for result in results] == [1, 2, 3, 4]


async def test_the_blocking_stream_gives_the_same(executor: ServiceProcess) -> None:
    async with aio.ExecutorClient(executor.address) as client:
        expected = await solo(client, 3)

    def use() -> list[int]:
        with (
            ExecutorClient(executor.address) as client,
            client.session() as session,
            client.stream(timeout_s=20) as stream,
        ):
            stream.send(session.step(openings=[opening(1)]))
            stream.send(session.step(rows=row(1, len(PROMPT))))
            stream.send(session.step(rows=row(1, len(PROMPT) + 1)))
            return [token for _ in range(3) for token in stream.recv().rows.tokens]

    assert await asyncio.to_thread(use) == expected


async def test_a_refused_step_is_raised_uses_no_number_and_leaves_the_stream_alive(
    executor: ServiceProcess,
) -> None:
    async with (
        aio.ExecutorClient(executor.address) as client,
        client.session() as session,
        client.stream(timeout_s=20) as stream,
    ):
        await stream.send(session.step(rows=pb.Rows(cache_ids=[1, 2], kv_lengths=[0])))
        with pytest.raises(errors.StepRefused, match="kv_lengths") as caught:
            await stream.recv()
        assert isinstance(caught.value.__cause__, errors.InvalidRequest)
        session.last_step_id -= 1
        await stream.send(session.step(openings=[opening(1)]))
        assert (await stream.recv()).rows.kv_lengths == [len(PROMPT)]


async def test_an_exact_replay_is_answered_from_the_store(executor: ServiceProcess) -> None:
    async with aio.ExecutorClient(executor.address) as client, client.session() as session:
        step = session.step(openings=[opening(1)])
        first = await client.unified_decode(step)
        assert (await client.unified_decode(step)).rows == first.rows


async def test_a_session_ends_with_its_block(executor: ServiceProcess) -> None:
    async with aio.ExecutorClient(executor.address) as client:
        async with client.session() as session:
            await client.batch_prefill(session.step(openings=[opening(1), opening(2)]))
            assert (await client.get_status(session.id)).sequences == 2
        assert (await client.get_status()).sequences == 0
        with pytest.raises(errors.NotFound):
            await client.get_status(session.id)


async def test_ops_verification_and_steps(executor: ServiceProcess) -> None:
    async with aio.ExecutorClient(executor.address) as client:
        t1, t2, t3, t4 = await solo(client, 4)
        async with client.session() as session:
            await client.prefill(session.step(openings=[opening(1)]))
            verified = await client.forward_verify(
                session.step(rows=row(1, 5, drafts=[t2, t3, t3 + 1], draft_counts=[3]))
            )
            assert list(verified.rows.tokens) == [t2, t3, t4]
            cut = await client.truncate_kv(session.header(), 1, 5)
            assert [op.kv_length for op in cut.ops] == [5]
            again = await client.batch_decode(
                session.step(rows=row(1, 5, tokens=[t1], token_counts=[1], steps=[3]))
            )
            assert list(again.rows.tokens) == [t2, t3, t4]
            fork = pb.Fork(source_id=1, cache_id=2, length=4, sampling=pb.Sampling(seed=1))
            await client.fork_cache(session.header(), fork)
            forked = await client.decode(session.step(rows=row(2, 4, tokens=PROMPT[4:], token_counts=[1])))
            assert list(forked.rows.tokens) == [t1]
            released = await client.release_cache(session.header(), [1, 2, 3])
            assert [op.released for op in released.ops] == [2]


def test_the_blocking_client_makes_every_other_call(executor: ServiceProcess) -> None:
    with ExecutorClient(executor.address) as client:
        info = client.get_info()
        assert info.backend == "oracle"
        assert client.get_tokenizer().tokenizer_json
        [result] = client.forward([PROMPT], [pb.FORWARD_OUTPUT_LOGITS])
        assert list(result.logits.shape) == [len(PROMPT), info.model.vocab_size]
        assert client.warmup() >= 0
        session: Session = client.open_session(label="test")
        assert client.unified_decode(session.step(openings=[opening(1)])).step_id == 1
        assert client.close_session(session.id) == 1
        with pytest.raises(errors.StaleState, match="epoch"):
            client.get_status(epoch=info.epoch + 1)


async def test_a_dead_executor_ends_the_stream_and_later_sends(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("dying")
    with running("executor_service", ["--backend", "oracle"], directory) as process:
        async with aio.ExecutorClient(process.address) as client, client.stream() as stream:
            await client.get_status()
            process.kill()
            with pytest.raises(errors.Unavailable):
                await stream.recv()
            with pytest.raises(errors.PacelineError):
                await stream.send(pb.Step())


async def test_drain_refuses_openings(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running("executor_service", ["--backend", "oracle"], tmp_path_factory.mktemp("drained")) as process:
        async with aio.ExecutorClient(process.address) as client:
            assert await client.drain(wait_s=0.5) == 0
            with pytest.raises(errors.Unavailable):
                await client.prefill(pb.Step(openings=[opening(1)]))
