"""Adapters: each row has its own and no other, from its opening until its cache is released."""

from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.adapters import Adapters, adapted, logits_behind
from tests.conformance.kit.client import Executor, Session
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.expect import code_of, refused
from tests.conformance.kit.judge import Judge
from tests.conformance.kit.sampler import log_softmax

NONE = b""
offered = pytest.mark.needs("ADAPTERS", "FULL_LOGITS")


@pytest.fixture
def adapters(executor: Executor, request: pytest.FixtureRequest) -> Iterator[Adapters]:
    if not executor.adapters:
        pytest.skip("which adapters can be loaded is not known; --adapters says")
    kit = Adapters(executor, executor.adapters)
    yield kit
    kit.close()


def test_what_is_not_advertised_is_unimplemented(executor: Executor, session: Session, draw: Draw) -> None:
    if executor.can("ADAPTERS"):
        executor.call("ListAdapters", pb.ListAdaptersRequest())
        return
    for rpc in ("LoadAdapter", "UnloadAdapter", "ListAdapters"):
        code = refused(executor.call, rpc, getattr(pb, f"{rpc}Request")())
        assert code is grpc.StatusCode.UNIMPLEMENTED
    (row,) = session.step(openings=[session.opening(draw.short(), adapter=bytes(32))]).rows
    assert row.code is grpc.StatusCode.UNIMPLEMENTED


@offered
def test_equal_content_has_one_fingerprint_whatever_its_name(adapters: Adapters) -> None:
    first, other = adapters.paths[:2]
    loaded = adapters.load(first)
    assert len(loaded.fingerprint) == 32
    assert loaded.rank >= 1
    assert loaded.modules
    assert loaded.bytes > 0
    before = adapters.status()
    assert adapters.load(first).fingerprint == loaded.fingerprint
    alias = adapters.load(first, "conformance.alias")
    assert alias.fingerprint == loaded.fingerprint
    assert adapters.status().bytes == before.bytes, "the same weights are there twice"
    assert adapters.load(other).fingerprint != loaded.fingerprint
    assert adapters.listed()[loaded.name] == loaded
    assert adapters.unload(loaded.name)
    assert not adapters.unload(loaded.name)
    assert loaded.name not in adapters.listed()
    assert adapters.load(first).fingerprint == loaded.fingerprint


@offered
def test_rows_beside_each_other_are_computed_each_with_its_own(
    adapters: Adapters, session: Session, draw: Draw, judge: Judge, executor: Executor
) -> None:
    chosen = [NONE, *adapters.load_all()[: executor.limits.max_adapter_slots]]
    prompt, tokens = draw.prompt(), draw.tokens(3)
    alone = [logits_behind([adapted(session, prompt, one)], tokens)[0] for one in chosen]
    for one in range(1, len(chosen)):
        assert abs(alone[one] - alone[0]).max() > 0, "this adapter changes nothing, and shows nothing"
    openings = [session.opening(prompt, adapter=one) for one in chosen]
    together = session.open_all(openings)
    for sequence in together:
        sequence.truncate(len(prompt))
    beside = logits_behind(together, tokens)
    for one, many in zip(alone, beside, strict=True):
        judge.check_same(one, many)


@offered
@pytest.mark.needs("PREFIX_CACHE")
def test_pages_are_shared_under_the_same_adapter_only(
    adapters: Adapters, session: Session, draw: Draw, judge: Judge, executor: Executor
) -> None:
    chosen = [adapters.load(path).fingerprint for path in adapters.paths[:2]]
    prompt, tokens = draw.prompt(), draw.tokens(2)
    cold = [adapted(session, prompt, one) for one in (*chosen, NONE)]
    for sequence in cold:
        sequence.feed(tokens=tokens[:1])  # pages are shared once something after them was sampled
    warm = [adapted(session, prompt, one) for one in (*chosen, NONE)]
    assert [sequence.hit for sequence in cold] == [0, 0, 0]
    for one, again in zip(cold, warm, strict=True):
        assert again.hit >= (len(prompt) - 1) // executor.page * executor.page
        one.truncate(len(prompt))
        judge.check_same(logits_behind([one], tokens), logits_behind([again], tokens))


@offered
@pytest.mark.needs("SCORES")
def test_scores_are_of_the_sequences_own_adapter(adapters: Adapters, session: Session, draw: Draw) -> None:
    """Beside those of others: the log-softmax of the logits that tokens after the same prompt have."""
    prompt = draw.prompt()
    chosen = [NONE, *(adapters.load(path).fingerprint for path in adapters.paths[:2])]
    scored = session.open_all([session.opening(prompt, adapter=one, scored_from=2) for one in chosen])
    fed = [adapted(session, prompt[:1], one) for one in chosen]
    for sequence, logits in zip(scored, logits_behind(fed, prompt[1:-1]), strict=True):
        scores = sequence.last.detail.scores
        expected = log_softmax(logits)[np.arange(len(prompt) - 2), prompt[2:]]
        assert scores.first == 2
        assert np.allclose(scores.logprobs, expected, atol=1e-3)


@offered
def test_the_order_in_which_adapters_find_a_prompt_does_not_matter(
    adapters: Adapters, session: Session, draw: Draw
) -> None:
    """What another adapter has cached is never found, whoever came first."""
    one, other = (adapters.load(path).fingerprint for path in adapters.paths[:2])
    for first, second in ((one, other), (other, NONE), (NONE, one)):
        prompt = draw.prompt()
        session.open(prompt, adapter=first)
        assert session.open(prompt, adapter=second).hit == 0


@offered
@pytest.mark.needs("FORK")
def test_a_fork_has_its_sources_adapter(
    adapters: Adapters, session: Session, draw: Draw, judge: Judge
) -> None:
    adapter = adapters.load(adapters.paths[0])
    prompt, tokens = draw.prompt(), draw.tokens(3)
    source = adapted(session, prompt, adapter.fingerprint)
    fork = session.fork(source, source.n)
    adapters.unload(adapter.name)
    late = session.fork(source, source.n)
    logits = logits_behind([source, fork, late], tokens)
    session.release(source)
    judge.check_same(logits[0], logits[1])
    judge.check_same(logits[0], logits[2])
    plain = logits_behind([adapted(session, prompt, NONE)], tokens)[0]
    assert abs(plain - logits[1]).max() > 0


@offered
def test_a_sequence_goes_on_with_an_adapter_that_is_unloaded(
    adapters: Adapters, session: Session, draw: Draw, judge: Judge
) -> None:
    adapter, *others = (adapters.load(path) for path in adapters.paths)
    prompt, tokens = draw.prompt(), draw.tokens(2)
    undisturbed = adapted(session, prompt, adapter.fingerprint)
    expected = logits_behind([undisturbed], tokens)[0]
    session.release(undisturbed)
    running = adapted(session, prompt, adapter.fingerprint)
    assert adapters.unload(adapter.name)
    (row,) = session.step(openings=[session.opening(prompt, adapter=adapter.fingerprint)]).rows
    assert (row.code, row.reason) == (grpc.StatusCode.NOT_FOUND, pb.ERROR_REASON_ADAPTER)
    for other in others:  # whoever needs a slot does not get that of the running one
        session.release(adapted(session, prompt, other.fingerprint))
    judge.check_same(expected, logits_behind([running], tokens)[0])
    bytes_before = adapters.status().bytes
    session.release(running)
    assert adapters.status().bytes == bytes_before - adapter.bytes


@offered
def test_more_adapters_than_slots_wait_for_a_release(
    adapters: Adapters, session: Session, draw: Draw, executor: Executor
) -> None:
    slots = executor.limits.max_adapter_slots
    if len(adapters.paths) <= slots:
        pytest.skip(f"{slots} slots can't be filled with {len(adapters.paths)} adapters")
    before = adapters.status()
    assert (before.used_slots, before.slots) == (0, slots)
    chosen = adapters.load_all()
    holders = [adapted(session, draw.short(), one) for one in chosen[:slots]]
    openings = [session.opening(draw.short(), adapter=one) for one in (NONE, chosen[slots], chosen[0])]
    rows = session.step(openings=openings).rows
    assert [row.code for row in rows] == [
        grpc.StatusCode.OK,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.OK,
    ]
    assert rows[1].reason == pb.ERROR_REASON_ADAPTER_SLOTS
    assert adapters.status().used_slots == slots
    session.release(holders[1])
    adapted(session, draw.short(), chosen[slots])
    after = adapters.status()
    assert after.used_slots == slots
    assert after.evictions > before.evictions
    listed = {adapter.fingerprint: adapter for adapter in adapters.listed().values()}
    assert [listed[one].caches for one in (chosen[0], chosen[1], chosen[slots])] == [2, 0, 1]
    assert listed[chosen[slots]].rows == 1
    assert list(after.adapters) == [one for _, one in sorted(adapters.listed().items())]
    session.close()
    assert adapters.status().used_slots == 0


@offered
def test_bad_names_paths_and_fingerprints_are_refused(
    adapters: Adapters, session: Session, draw: Draw, executor: Executor
) -> None:
    one, other = adapters.paths[:2]
    name = adapters.load(one).name
    bad = [("", one), (".", one), ("..", one), ("a/b", one), ("a b", one), ("é", one), ("x" * 129, one)]
    bad += [("ok", path) for path in ("..", f"../{one}", f"/{one}", f"{one}/../{other}", ".", f"{one}\0")]
    for text, path in bad:
        with pytest.raises(grpc.RpcError) as caught:
            adapters.load(path, text or "-")
        assert code_of(caught.value) is grpc.StatusCode.INVALID_ARGUMENT, (text, path)
    assert refused(adapters.load, "no-such-directory") is grpc.StatusCode.NOT_FOUND
    assert refused(adapters.load, other, name) is grpc.StatusCode.ALREADY_EXISTS
    short, unknown = (
        session.step(openings=[session.opening(draw.short(), adapter=fingerprint)]).rows[0]
        for fingerprint in (bytes(31), bytes(32))
    )
    assert short.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (unknown.code, unknown.reason) == (grpc.StatusCode.NOT_FOUND, pb.ERROR_REASON_ADAPTER)
    assert list(adapters.listed()) == [name]
