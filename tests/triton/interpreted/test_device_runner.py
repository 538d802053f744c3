"""`DeviceRunner`, interpreted on CPU, computes what the host's runner does: ahead of it, padded or not."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor_service.backends.acceptance import resolved
from executor_service.backends.base import ForwardRow, PromptOutputs
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.cuda.kernels import CudaKernels
from executor_service.backends.torch_backend.cuda.picking import late_picks
from executor_service.backends.torch_backend.cuda.run import graphs
from executor_service.backends.torch_backend.cuda.run.device_runner import DeviceRunner
from executor_service.backends.torch_backend.cuda.run.warmup_rows import rows_of_every_kind
from executor_service.backends.torch_backend.model.host_runner import HostRunner
from executor_service.backends.torch_backend.model.shard import Whole
from executor_service.contract.limits import Limits
from executor_service.contract.plan import Fork, OutputMode, Release, Sampling, StepResult
from executor_service.steps.engine import Engine
from tests.conformance.kit.tiny_model import write_tiny_model
from tests.support.engine_steps import BegunStep, begin
from tests.support.untyped import present
from tests.triton.interpreted.device_rows import (
    DRAWN,
    MIXED,
    PAGE,
    PAGES,
    TABLES,
    TOKENS,
    fill,
    following,
    masked,
    row,
    same,
)
from tests.triton.interpreted.rows_behind_drafts import check_rows_behind_drafts
from tests.unit.executor.harness import opening, plan
from tests.unit.executor.harness import row as row_of
from tests.unit.executor.table_grammar import loops

# Padding tokens attend to nothing, and what they are then is whatever lay in memory.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchBackend]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBackend, "_kernels", lambda self: CudaKernels(CPU, torch.float32))
        backend = TorchBackend(TorchConfig(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", 128)))
        backend.load(lambda what, done: None)
        yield backend
        backend.close()


@pytest.fixture
def runner(backend: TorchBackend) -> DeviceRunner:
    """On KV storage of its own."""
    return DeviceRunner(backend.model, backend.model.new_caches(PAGES, PAGE), PAGE)


def capture(runner: DeviceRunner, rows: int, *, short: tuple[int, ...], long: tuple[int, ...]) -> list[float]:
    """Capture graphs of so many tokens; the progress that was told."""
    told: list[float] = []
    sizes: dict[str, Any] = {"_SHORT_TOKENS": short, "_LONG_TOKENS": long, "_LONG_OUTPUTS": (6,)}
    with mock.patch.multiple(graphs, **sizes):
        runner.capture(rows, 160, lambda what, done: told.append(done))
    return told


@pytest.fixture(scope="module")
def captured(backend: TorchBackend) -> DeviceRunner:
    """With three graphs: decodes, verifies, and a chunk beside decodes."""
    runner = DeviceRunner(backend.model, backend.model.new_caches(PAGES, PAGE), PAGE)
    assert capture(runner, 4, short=(4, 20), long=(24,)) == [0, 1 / 3, 2 / 3, 1]
    return runner


@pytest.fixture
def capturing(captured: DeviceRunner) -> DeviceRunner:
    """With graphs, on pages of zeros."""
    for cache in captured._caches:
        cache.k.zero_()
        cache.v.zero_()
    return captured


@pytest.fixture(params=["eager", "captured"])
def either(request: pytest.FixtureRequest) -> DeviceRunner:
    fixture: DeviceRunner = request.getfixturevalue("runner" if request.param == "eager" else "capturing")
    return fixture


def test_prompts_are_scored_and_pooled_as_on_the_host(backend: TorchBackend, either: DeviceRunner) -> None:
    """Beside a row that samples, which the next launch continues."""
    plain = row("a", 0, 40, outputs=0, output=OutputMode.NONE, sampling=Sampling(logprobs=2))
    rows = [
        replace(plain, prompt=PromptOutputs(5, np.array(TOKENS["a"][5:41], np.int32))),
        row("b", 0, 20),
        replace(row("c", 0, 30), prompt=PromptOutputs(1, np.array(TOKENS["c"][1:30], np.int32), total=True)),
        replace(row("d", 0, 9, outputs=0, output=OutputMode.HIDDEN), prompt=PromptOutputs(last=True)),
    ]
    host = HostRunner(backend.model, Whole(), backend.model.new_caches(PAGES, PAGE), PAGE)
    ours, theirs = either.launch(ForwardRows(rows)).outputs(), host.launch(ForwardRows(rows)).outputs()
    same(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        for x, y in ((a.scores, b.scores), (a.hidden, b.hidden), (a.hidden_sum, b.hidden_sum)):
            assert (x is None) == (y is None)
        if a.scores is not None and b.scores is not None:
            assert (a.scores.first, a.scores.top_ids.tolist()) == (b.scores.first, b.scores.top_ids.tolist())
            np.testing.assert_allclose(a.scores.logprobs, b.scores.logprobs, atol=1e-5)
        if a.hidden_sum is not None and b.hidden_sum is not None:
            np.testing.assert_allclose(a.hidden_sum, b.hidden_sum, atol=1e-3)
        if a.hidden is not None and b.hidden is not None:
            np.testing.assert_allclose(a.hidden, b.hidden, atol=1e-5)
    assert ours[0].scores is not None
    assert ours[0].scores.logprobs.shape == (36,)
    tokens = ours[1].tokens
    assert tokens is not None
    known = replace(row("b", 20, 1), tokens=tokens, history=np.append(rows[1].history, tokens))
    same(
        either.launch(ForwardRows([following("b", 20, 1)])).outputs(),
        host.launch(ForwardRows([known])).outputs(),
    )


def test_steps_of_every_kind_give_what_the_hosts_runner_gives(
    backend: TorchBackend, either: DeviceRunner
) -> None:
    backend.allocate(PAGES, PAGE)
    for rows in MIXED:
        same(either.launch(ForwardRows(rows)).outputs(), backend.forward(rows))


def test_positions_whose_logits_do_not_exist_at_once_are_answered_as_if_they_did(
    backend: TorchBackend, runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three at a time, so that most rows have theirs in several parts; the next launch continues one."""
    monkeypatch.setattr(late_picks, "LOGITS_ROWS", 3)
    penalized = replace(DRAWN, repetition_penalty=1.4, presence_penalty=0.3)
    plain = row("e", 0, 20, outputs=0, output=OutputMode.NONE, sampling=Sampling(logprobs=2))
    rows = [
        row("a", 0, 9, outputs=4, sampling=penalized),
        row("b", 0, 9, outputs=5, sampling=replace(penalized, logprobs=3)),
        row("c", 0, 9, outputs=4, output=OutputMode.FULL),
        row("d", 0, 4, outputs=2, output=OutputMode.TOP_K),
        replace(plain, prompt=PromptOutputs(5, np.array(TOKENS["e"][5:21], np.int32))),
    ]
    host = HostRunner(backend.model, Whole(), backend.model.new_caches(PAGES, PAGE), PAGE)
    ours, theirs = runner.launch(ForwardRows(rows)).outputs(), host.launch(ForwardRows(rows)).outputs()
    same(ours, theirs)
    scores, expected = present(ours[4].scores), present(theirs[4].scores)
    assert scores.top_ids.tolist() == expected.top_ids.tolist()
    np.testing.assert_allclose(scores.logprobs, expected.logprobs, atol=1e-5)
    behind = replace(following("b", 9, 1), slack=4)
    same(
        runner.launch(ForwardRows([behind])).outputs(),
        host.launch(ForwardRows([resolved(behind, rows[1], ours[1])])).outputs(),
    )


def test_a_step_that_is_launched_before_the_last_one_is_read_goes_on_with_its_tokens(
    either: DeviceRunner,
) -> None:
    runner = either
    fill(runner, a=3, b=5)
    biased = replace(DRAWN, logit_bias=((5, 50.0),))  # its token comes from the host's sampler
    first = runner.launch(ForwardRows([row("a", 3, 1), row("c", 0, 2), row("b", 5, 1, sampling=biased)]))
    second = runner.launch(ForwardRows([following("b", 6, 2), following("c", 2, 1), following("a", 4, 0)]))
    a, c, b = (int(out.tokens[0]) for out in first.outputs() if out.tokens is not None)
    ahead = second.outputs()
    rows = [
        replace(row(name, start, 1), tokens=np.full(1, token, np.int32))
        for name, start, token in (("b", 6, b), ("c", 2, c), ("a", 4, a))
    ]
    assert b == 5
    same(ahead, runner.launch(ForwardRows(rows)).outputs())


@pytest.mark.parametrize("sampling", [DRAWN, replace(DRAWN, logprobs=2)], ids=["drawn", "logprobs"])
def test_a_mask_that_comes_behind_the_launch_counts_and_the_next_step_goes_on_with_its_token(
    either: DeviceRunner, sampling: Sampling
) -> None:
    """For a row that the device picks, and for one that the sampler does; None allows anything."""
    runner = either
    fill(runner, a=3, b=5, c=2)
    first = runner.launch(ForwardRows([row("a", 3, 1), row("b", 5, 1), row("c", 2, 1)]))
    later = replace(following("a", 4, 0, sampling), masked_later=True)
    unmasked = replace(following("c", 3, 2), masked_later=True)
    second = runner.launch(ForwardRows([following("b", 6, 1), later, unmasked]))
    a, b, c = (int(out.tokens[0]) for out in first.outputs() if out.tokens is not None)
    only = masked(row("a", 4, 1), range(300, 303)).masks
    second.constrain({1: only, 2: None})
    third = runner.launch(ForwardRows([following("a", 5, 1), following("b", 7, 0)]))
    ahead = second.outputs(), third.outputs()
    found = [int(out.tokens[0]) for out in ahead[0] if out.tokens is not None]
    assert 300 <= found[1] < 303

    def known(name: str, start: int, token: int, sampling: Sampling = DRAWN) -> ForwardRow:
        return replace(row(name, start, 1, sampling=sampling), tokens=np.full(1, token, np.int32))

    rows = [known("b", 6, b), replace(known("a", 4, a, sampling), masks=only), known("c", 3, c)]
    same(ahead[0], runner.launch(ForwardRows(rows)).outputs())
    same(ahead[1], runner.launch(ForwardRows([known("a", 5, found[1]), known("b", 7, found[0])])).outputs())


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_row_behind_drafts_that_are_not_read_starts_where_these_end(
    backend: TorchBackend, capturing: DeviceRunner, seed: int
) -> None:
    host = HostRunner(backend.model, Whole(), backend.model.new_caches(PAGES, PAGE), PAGE)
    check_rows_behind_drafts(capturing, host, seed)


def test_a_row_that_is_not_finite_harms_nobody_and_nobody_who_follows(capturing: DeviceRunner) -> None:
    fill(capturing, a=4, b=4)
    for cache in capturing._caches:
        cache.k[TABLES["a"][0], 3] = torch.nan
    first = capturing.launch(ForwardRows([row("a", 4, 1), row("b", 4, 1)]))
    second = capturing.launch(ForwardRows([following("a", 5, 0), following("b", 5, 1)]))
    assert [out.finite for out in first.outputs()] == [False, True]
    assert [out.finite for out in second.outputs()] == [False, True]


class ReadsBack(TorchDispatchMode):
    """Fails where the host would wait for the device, or would send it something: a graph has neither."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.name()
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::item"), name
        return func(*args, **(kwargs or {}))


def test_a_captured_step_reads_nothing_back(capturing: DeviceRunner) -> None:
    fill(capturing, a=3)
    with ReadsBack():
        capturing.launch(ForwardRows([row("a", 3, 1), row("b", 0, 9)])).outputs()


def test_a_second_capture_replaces_the_first(backend: TorchBackend, runner: DeviceRunner) -> None:
    """Its buffer is a new one, which graphs of the first capture do not read."""
    capture(runner, 4, short=(4,), long=())
    capture(runner, 2, short=(2,), long=())
    backend.allocate(PAGES, PAGE)
    for names in ("ab", "abcd"):  # four rows fitted a graph of the first capture
        rows = [row(name, 0, 1) for name in names]
        same(runner.launch(ForwardRows(rows)).outputs(), backend.forward(rows))


def test_steps_use_the_same_host_buffers_again(capturing: DeviceRunner) -> None:
    """Those of the capture, also where two steps are pending."""
    hosts = {buffer.tensor.data_ptr() for buffer in capturing._hosts._free}
    pending = deque([capturing.launch(ForwardRows([row("a", 0, 9), row("b", 0, 2)]))])
    for start in range(9, 14):
        pending.append(capturing.launch(ForwardRows([row("a", start, 1)])))
        pending.popleft().outputs()
    pending.pop().outputs()
    assert {buffer.tensor.data_ptr() for buffer in capturing._hosts._free} == hosts
    assert len(hosts) == 3


def test_a_step_whose_rows_want_everything_reads_nothing_back_before_its_answer(
    runner: DeviceRunner,
) -> None:
    with ReadsBack():
        runner.launch(ForwardRows(rows_of_every_kind(320))).outputs()


def test_a_step_that_no_graph_holds_runs_all_the_same(capturing: DeviceRunner, backend: TorchBackend) -> None:
    backend.allocate(PAGES, PAGE)
    rows = [row(name, 0, 9) for name in "abcde"]
    same(capturing.launch(ForwardRows(rows)).outputs(), backend.forward(rows))


def test_an_engine_with_two_steps_under_way_answers_like_one_that_waits_for_each(
    backend: TorchBackend, capturing: DeviceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(320, 128, PAGE, PAGES - 1, max_sequences=4, max_rows=4, max_step_tokens=64)
    openings = [opening(1, TOKENS["a"][:5], seed=3), opening(2, TOKENS["b"][:9], seed=4)]

    def answers(depth: int) -> list[StepResult]:
        engine, steps, results = Engine(backend, limits, 1), deque[BegunStep](), []
        for n in range(7):
            rows = [row_of(1, 5 + n - 1), row_of(2, 9 + n - 1)] if n else []
            ops = (Release((2,)),) if n == 4 else ()
            steps.append(begin(engine, plan(*rows[: 1 if n >= 4 else 2], *(() if n else openings), ops=ops)))
            while len(steps) >= depth:
                results.append(steps.popleft().finish())
        results += [step.finish() for step in steps]
        engine.store.check()
        return results

    backend.allocate(PAGES, PAGE)
    expected = answers(1)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_runner", capturing)
        patch.setattr(backend, "max_pending_forwards", 2)
        found = answers(2)
    assert [[r.tokens for r in result.rows] for result in found] == [
        [r.tokens for r in result.rows] for result in expected
    ]
    assert all(len(r.tokens) == 1 for result in found for r in result.rows)


def test_a_sequence_with_a_grammar_is_sampled_as_where_steps_wait_for_each_other(
    backend: TorchBackend, capturing: DeviceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its masks come later; its neighbour's tokens are those of a run without it."""
    limits = Limits(320, 128, PAGE, PAGES - 1, max_sequences=4, max_rows=4, max_step_tokens=64)
    constrained = replace(DRAWN, grammar=loops(end=257, vocabulary=320))
    openings = [
        replace(opening(1, TOKENS["a"][:5]), sampling=constrained),
        opening(2, TOKENS["b"][:9], seed=4),
    ]

    def answers(depth: int) -> list[list[list[int]]]:
        engine, steps, results = Engine(backend, limits, 1), deque[BegunStep](), []
        for n in range(9):
            rows = [row_of(1, 5 + n - 1), row_of(2, 9 + n - 1)] if n else []
            steps.append(begin(engine, plan(*rows, *(() if n else openings))))
            while len(steps) >= depth:
                results.append(steps.popleft().finish())
        results += [step.finish() for step in steps]
        return [[answer.tokens for answer in result.rows] for result in results]

    backend.allocate(PAGES, PAGE)
    expected = answers(1)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_runner", capturing)
        patch.setattr(backend, "max_pending_forwards", 2)
        found = answers(2)
    assert found == expected
    assert all(10 <= token <= 15 or token == 257 for (token,), _ in found)


def test_rows_that_want_more_than_a_token_run_ahead_and_answer_as_where_each_step_waits(
    backend: TorchBackend, capturing: DeviceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties count the token that is not known yet; a fork has its source's, in a page of its own."""
    limits = Limits(320, 128, PAGE, PAGES - 1, max_sequences=4, max_rows=4, max_step_tokens=64)
    everything = Sampling(
        repetition_penalty=1.5, frequency_penalty=0.7, logit_bias=((5, 2.0),), stop_token_ids=(5, 9),
        min_tokens=3, logprobs=2,
    )  # fmt: skip
    openings = [
        replace(opening(1, TOKENS["a"][:5]), sampling=everything),
        replace(opening(2, TOKENS["b"][:9]), sampling=replace(everything, temperature=3.0, seed=4)),
    ]

    def answers(depth: int) -> list[StepResult]:
        engine, steps, results = Engine(backend, limits, 1), deque[BegunStep](), []
        for n in range(6):
            rows = [row_of(1, 5 + n - 1), row_of(2, 9 + n - 1)] if n else []
            steps.append(begin(engine, plan(*rows, *(() if n else openings))))
            while len(steps) >= depth:
                assert len(engine.pipeline) == (0 if depth == 1 else 2)
                results.append(steps.popleft().finish())
        copy = Fork(2, 3, 12, everything)
        steps.append(begin(engine, plan(row_of(1, 10), row_of(3, 12, [7]), ops=(copy,))))
        steps.append(begin(engine, plan(row_of(1, 11), row_of(3, 13))))
        results += [step.finish() for step in steps]
        engine.store.check()
        return results

    backend.allocate(PAGES, PAGE)
    expected = answers(1)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_runner", capturing)
        patch.setattr(backend, "max_pending_forwards", 2)
        found = answers(2)
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours.rows, theirs.rows, strict=True):
            assert (a.tokens, a.refusal) == (b.tokens, None)
            np.testing.assert_array_equal(present(a.top_ids), present(b.top_ids))
            np.testing.assert_allclose(present(a.logprobs), present(b.logprobs), atol=1e-5)
