"""What rows want beyond a drawn token is computed on the device, and is what the host's sampler gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_service.backends import numpy_sampler
from executor_service.backends.base import ForwardRow, PromptOutputs
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.numpy_sampler import log_softmax
from executor_service.backends.torch_backend.cuda.layout.host_buffers import upload
from executor_service.backends.torch_backend.cuda.layout.resolve import TokenPages
from executor_service.backends.torch_backend.cuda.picking.late_parts import LateParts, histories, stops
from executor_service.backends.torch_backend.cuda.picking.late_plan import first_length, plan_late
from executor_service.backends.torch_backend.cuda.picking.listed_tokens import (
    Biases,
    bias_launch,
    stop_launches,
)
from executor_service.backends.torch_backend.cuda.picking.logprobs import ChosenTokens, Measures, measure
from executor_service.backends.torch_backend.cuda.picking.penalties import penalty_launches
from executor_service.backends.torch_backend.ops.sampler import ranked
from executor_service.contract.plan import OutputMode, Sampling
from tests.unit.executor.rows import make_row

CPU = torch.device("cpu")
PAGE, VOCABULARY = 16, 97


def paged(rows: Sequence[ForwardRow]) -> TokenPages:
    """The rows' histories in their pages; elsewhere are ids that would be noticed."""
    pages = TokenPages(64, PAGE, CPU)
    pages.ids.fill_(VOCABULARY - 1)
    for row in rows:
        places = np.arange(len(row.history))
        page = torch.from_numpy(row.block_table[places // PAGE])
        slot = torch.from_numpy((places % PAGE).astype(np.int32))
        pages.ids[page, slot] = torch.from_numpy(row.history)
    return pages


def adjusted(logits: torch.Tensor, rows: Sequence[ForwardRow]) -> torch.Tensor:
    """The logits of all rows' outputs after penalties, biases and masks of stop ids, by the kernels."""
    plan = plan_late(ForwardRows(rows), range(len(rows)), prompts=False)
    assert plan is not None
    assert (plan.again, plan.owners.tolist()) == (len(logits), sorted(plan.owners.tolist()))
    late = LateParts(rows, plan, slice(0, plan.again), PAGE)
    sent = upload(late.parts, CPU)
    firsts = np.array([first_length(row) for row in rows], np.int32)
    lengths = torch.from_numpy(firsts[plan.owners] + plan.offsets)
    out = logits.clone()
    if late.penalized:
        counts = torch.zeros(out.shape, dtype=torch.int32)
        for launch in penalty_launches(out, paged(rows).ids, histories(sent, lengths), counts):
            launch.run()
    if late.biased:
        bias_launch(out, Biases(*(sent[name] for name in Biases.__slots__))).run()
    if late.max_stops:
        for launch in stop_launches(out, stops(sent, lengths), torch.empty(len(out), late.max_stops)):
            launch.run()
    return out


def f32(value: float) -> float:
    return float(np.float32(value))


samplings = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 1.0, f32(1.3), f32(0.7)]),
    presence_penalty=st.sampled_from([0.0, f32(0.7), -2.0]),
    frequency_penalty=st.sampled_from([0.0, f32(0.1), f32(-1.7)]),
    logit_bias=st.sampled_from([(), ((5, f32(0.3)),), ((0, -1000.0), (7, f32(2.2)), (96, 4.0))]),
    stop_token_ids=st.sampled_from([(), (3,), (9, 3, 9), tuple(range(VOCABULARY))]),
    min_tokens=st.sampled_from([0, 1, 12, 13, 99]),
).filter(lambda s: changes_logits(s))


def changes_logits(s: Sampling) -> bool:
    return s != replace(Sampling(), stop_token_ids=s.stop_token_ids, min_tokens=s.min_tokens)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(samplings, min_size=1, max_size=3), st.integers(0, 2**32))
def test_logits_are_adjusted_to_the_bit_as_the_reference_sampler_does(
    chosen: list[Sampling], seed: int
) -> None:
    """Of rows with histories of any length, some with drafts: each output has a history of its own."""
    rng = np.random.default_rng(seed)
    rows, logits, expected = [], [], []
    for i, sampling in enumerate(chosen):
        count, outputs = int(rng.integers(1, 60)), int(rng.integers(1, 4))
        tokens = rng.integers(0, 20, count + outputs - 1).astype(np.int32)
        prompt = int(rng.integers(1, count + 1))
        row = make_row(
            tokens.tolist(), range(1 + 4 * i, 5 + 4 * i),
            start=count - 1, outputs=outputs, output=OutputMode.SAMPLE, sampling=sampling,
            prompt_length=prompt,
        )  # fmt: skip
        mine = rng.standard_normal((outputs, VOCABULARY)).astype(np.float32) * 3
        rows.append(row)
        logits.append(mine)
        expected += [
            numpy_sampler.adjust(mine[n], tokens[: count + n], prompt, sampling) for n in range(outputs)
        ]
    found = adjusted(torch.from_numpy(np.concatenate(logits)), rows)
    assert found.numpy().tobytes() == np.stack(expected).tobytes()


def test_a_mask_of_stop_ids_that_leaves_no_token_gives_way_for_its_row_alone() -> None:
    """Whether a grammar has excluded the others, or there are no others."""
    some = Sampling(stop_token_ids=(4, 2), min_tokens=9)
    rows = [
        make_row([1], [1 + i], output=OutputMode.SAMPLE, sampling=s)
        for i, s in enumerate([some, some, replace(some, stop_token_ids=tuple(range(VOCABULARY)))])
    ]
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((3, VOCABULARY)).astype(np.float32))
    logits[1] = -torch.inf
    logits[1, 2] = 7.0
    found = adjusted(logits, rows)
    expected = logits.clone()
    expected[0, [2, 4]] = -torch.inf
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("k", "grain"), [(0, 0.0), (1, 0.0), (5, 0.5), (20, 1.0), (33, 3.0), (97, 1.0)])
def test_logprobs_are_those_of_the_raw_logits_and_ties_go_to_the_lowest_ids(k: int, grain: float) -> None:
    logits = np.random.default_rng(k).standard_normal((4, VOCABULARY)).astype(np.float32) * 3
    if grain:
        logits = np.round(logits / grain) * np.float32(grain)
    logits[3] = 0
    wide = torch.zeros(4, VOCABULARY + 3)
    wide[:, :VOCABULARY] = torch.from_numpy(logits)
    measures = Measures.empty(4, k, CPU)
    numbers = torch.tensor([[-1, 5, -1, 96], [0, 2, 1, 0], [7, 8, 9, 0]], dtype=torch.int32)
    chosen = ChosenTokens(*numbers)
    measure(wide[:, :VOCABULARY], chosen, measures)
    expected = log_softmax(logits)
    tokens = [7, 5, 8, 96]
    np.testing.assert_allclose(measures.floats[:, 0].numpy(), expected[range(4), tokens], atol=2e-6)
    assert measures.ints[:, 0].tolist() == [1] * 4
    if k:
        _, ids = ranked(torch.from_numpy(logits), k)
        assert measures.ints[:, 1:].tolist() == ids.tolist()
        np.testing.assert_allclose(
            measures.floats[:, 1:].numpy(), np.take_along_axis(expected, ids.numpy(), -1), atol=2e-6
        )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_positions_that_are_not_finite_are_flagged_alone() -> None:
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((5, VOCABULARY)).astype(np.float32))
    for row, bad in ((0, torch.nan), (2, torch.inf), (3, -torch.inf)):
        logits[row, 90] = bad
    numbers = torch.zeros(5, dtype=torch.int32)
    measures = Measures.empty(5, 3, CPU)
    measure(logits, ChosenTokens(numbers, numbers, numbers), measures)
    assert measures.ints[:, 0].tolist() == [0, 1, 0, 0, 1]
    expected = log_softmax(logits[[1, 4]].numpy())[:, 0]
    np.testing.assert_allclose(measures.floats[[1, 4], 0].numpy(), expected, atol=2e-6)


def test_a_copied_page_has_its_tokens() -> None:
    pages = TokenPages(4, PAGE, CPU)
    pages.ids[2, 14:] = torch.tensor([5, 70], dtype=torch.int32)
    pages.copy(2, 1)
    assert (pages.ids[1, 14:].tolist(), int(pages.ids.count_nonzero())) == ([5, 70], 4)


def test_what_is_picked_comes_first_and_what_is_measured_follows() -> None:
    """So that any part of the positions is computed from one tensor of logits."""
    plain, scored = Sampling(), Sampling(logprobs=3)

    def row(output: OutputMode, sampling: Sampling, outputs: int = 1, targets: int = 0) -> ForwardRow:
        made = make_row([1] * 9, [1], output=output, sampling=sampling, outputs=outputs, top_k=2)
        if not targets:
            return made
        return replace(made, prompt=PromptOutputs(4, np.arange(targets, dtype=np.int32)))

    sample = OutputMode.SAMPLE
    rows = [
        row(OutputMode.FULL, plain, 2),
        row(sample, scored),
        row(sample, plain),
        row(sample, replace(scored, repetition_penalty=2.0), 2),
        row(OutputMode.NONE, scored, 0, targets=5),
        row(sample, replace(plain, logit_bias=((1, 1.0),))),
        row(OutputMode.TOP_K, plain),
    ]
    plan = plan_late(ForwardRows(rows), range(len(rows)), prompts=True)
    assert plan is not None
    assert plan.owners.tolist() == [5, 3, 3, 1, 6, 4, 4, 4, 4, 4, 0, 0]
    assert (plan.again, plan.measured, plan.copied) == (3, range(1, 10), range(10, 12))
    assert plan.tokens.tolist() == [53, 34, 35, 17, 62, 39, 40, 41, 42, 43, 7, 8]
    assert plan.outputs.tolist() == [6, 4, 5, 2, 7, 0, 0, 0, 0, 0, 0, 1]
    assert plan.known.tolist() == [-1] * 5 + [0, 1, 2, 3, 4] + [-1] * 2
    assert plan.alternatives == 3
    assert plan_late(ForwardRows(rows), [2], prompts=False) is None
