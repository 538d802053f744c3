"""The oracle: any wrong cache content changes its logits, and nothing else does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_service.backends.base import ForwardRow
from executor_service.backends.oracle_backend.oracle import EXIT_CODE, OracleBackend
from executor_service.backends.oracle_backend.settings import OracleSettings
from executor_service.contract.plan import OutputMode, Sampling
from tests.support.untyped import present
from tests.unit.executor.rows import last_logits, make_row

PAGE = 4
PROMPT = [5, 9, 256, 0, 7, 7, 1, 30, 2, 11]  # two full pages and a half
TABLE = [3, 1, 7]


def make(config: OracleSettings | None = None) -> OracleBackend:
    backend = OracleBackend(config)
    backend.load(lambda what, fraction: None)
    backend.allocate(40, PAGE)
    return backend


def fill(backend: OracleBackend, tokens: list[int], table: list[int], salt: bytes = b"") -> None:
    backend.forward([make_row(tokens, table, outputs=0, output=OutputMode.NONE, salt=salt)])


def decode(backend: OracleBackend, token: int = 8, table: list[int] = TABLE, **more: object) -> np.ndarray:
    """Logits after one more token on top of PROMPT."""
    row = make_row([*PROMPT, token], table, start=len(PROMPT), **more)  # type: ignore[arg-type]
    return last_logits(backend, row)


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """Logits of PROMPT + [8], in one piece on a fresh backend."""
    return last_logits(make(), make_row([*PROMPT, 8], TABLE))


def test_logits_lie_between_minus_4_and_4(expected: np.ndarray) -> None:
    assert expected.shape == (1, 257)
    assert expected.dtype == np.float32
    assert -4 <= expected.min() < -3.8
    assert 3.8 < expected.max() <= 4


def test_another_page_layout_changes_nothing(expected: np.ndarray) -> None:
    backend = make()
    fill(backend, PROMPT, [12, 30, 2])
    assert np.array_equal(decode(backend, table=[12, 30, 2]), expected)
    assert np.array_equal(decode(backend, table=[12, 30, 2, 9, 9]), expected)  # pages beyond the need


@given(chunks=st.lists(st.integers(1, 7), min_size=1, max_size=12))
def test_chunks_change_nothing(expected: np.ndarray, chunks: list[int]) -> None:
    backend, tokens, start = make(), [*PROMPT, 8], 0
    for chunk in chunks:
        end = min(start + chunk, len(PROMPT))
        if start < end:
            backend.forward([make_row(tokens[:end], TABLE, start=start, outputs=0)])
        start = end
    assert np.array_equal(last_logits(backend, make_row(tokens, TABLE, start=start)), expected)


def test_every_output_position_of_a_row_equals_its_own_step() -> None:
    whole = last_logits(make(), make_row(PROMPT, TABLE, outputs=len(PROMPT)))
    backend = make()
    for position in range(len(PROMPT)):
        alone = last_logits(backend, make_row(PROMPT[: position + 1], TABLE, start=position))
        assert np.array_equal(alone[0], whole[position])


def test_a_verify_row_equals_decoding_step_by_step() -> None:
    sampling = Sampling(temperature=1.0, seed=3)
    backend, tokens, table = make(), list(PROMPT), [3, 1, 7, 4, 5]
    fill(backend, PROMPT[:-1], table)
    for _ in range(6):
        row = make_row(
            tokens,
            table,
            start=len(tokens) - 1,
            output=OutputMode.SAMPLE,
            sampling=sampling,
            prompt_length=10,
        )
        (output,) = backend.forward([row])
        tokens.append(int(present(output.tokens)[0]))
    other = make()
    fill(other, PROMPT[:-1], table)
    verify = make_row(
        tokens[:-1],
        table,
        start=len(PROMPT) - 1,
        outputs=6,
        output=OutputMode.SAMPLE,
        sampling=sampling,
        prompt_length=10,
    )
    (output,) = other.forward([verify])
    assert present(output.tokens).tolist() == tokens[len(PROMPT) :]


@pytest.mark.parametrize("slot", range(len(PROMPT)))
def test_a_stale_slot_changes_the_logits(expected: np.ndarray, slot: int) -> None:
    backend = make()
    other = [*PROMPT[:slot], PROMPT[slot] + 1, *PROMPT[slot + 1 :]]
    fill(backend, other, TABLE)
    if slot:
        fill(backend, PROMPT[:slot], TABLE)  # what is before the slot is right again, the rest stale
    assert not np.array_equal(decode(backend), expected)


@pytest.mark.parametrize("slot", range(len(PROMPT)))
def test_a_slot_never_written_changes_the_logits(expected: np.ndarray, slot: int) -> None:
    backend = make()
    fill(backend, PROMPT, TABLE)
    backend._kv[TABLE[slot // PAGE], slot % PAGE] = 0
    assert not np.array_equal(decode(backend), expected)


@pytest.mark.parametrize("table", [[1, 3, 7], [3, 7, 1], [7, 1, 3], [3, 3, 7], [3, 1, 8]])
def test_a_wrong_block_table_changes_the_logits(expected: np.ndarray, table: list[int]) -> None:
    backend = make()
    fill(backend, PROMPT, TABLE)
    assert not np.array_equal(decode(backend, table=table), expected)


def test_a_wrong_position_changes_the_logits(expected: np.ndarray) -> None:
    backend = make()
    fill(backend, PROMPT, TABLE)
    early = make_row([*PROMPT[:-1], 8], TABLE, start=len(PROMPT) - 1)  # overwrites the last slot
    assert not np.array_equal(last_logits(backend, early), expected)
    fill(backend, PROMPT, TABLE)
    late = make_row([*PROMPT, 0, 8], TABLE, start=len(PROMPT) + 1)  # leaves a gap
    assert not np.array_equal(last_logits(backend, late), expected)


def test_a_page_with_the_same_tokens_after_another_prefix_is_not_the_same_page(expected: np.ndarray) -> None:
    backend = make()
    fill(backend, [1, 2, 3, 4, *PROMPT[4:8]], [20, 21])
    fill(backend, PROMPT, TABLE)
    assert not np.array_equal(decode(backend, table=[3, 21, 7]), expected)


def test_a_page_of_another_salt_is_not_the_same_page(expected: np.ndarray) -> None:
    backend = make()
    fill(backend, PROMPT, TABLE, salt=b"tenant")
    assert not np.array_equal(decode(backend), expected)


def test_the_same_page_after_the_same_prefix_can_be_shared(expected: np.ndarray) -> None:
    backend = make()
    fill(backend, PROMPT[:8], [20, 21])
    row = make_row([*PROMPT, 8], [20, 21, 22], start=8)
    assert np.array_equal(last_logits(backend, row), expected)


def test_a_copied_page_serves_a_fork_and_a_shared_partial_page_does_not(expected: np.ndarray) -> None:
    backend = make()
    fill(backend, PROMPT, TABLE)
    backend.copy_page(7, 9)
    fork = make_row([*PROMPT, 30], [3, 1, 9], start=len(PROMPT))
    original = make_row([*PROMPT, 8], TABLE, start=len(PROMPT))
    first, _ = backend.forward([original, fork])
    assert np.array_equal(present(first.logits), expected)
    sharing = make_row([*PROMPT, 30], TABLE, start=len(PROMPT))
    first, _ = backend.forward([original, sharing])
    assert not np.array_equal(present(first.logits), expected)  # the neighbour wrote over its slot


def test_a_truncated_sequence_continues_as_if_it_had_never_been_longer(expected: np.ndarray) -> None:
    backend = make()
    fill(backend, [*PROMPT, 1, 2, 3, 4, 5, 6], [3, 1, 7, 8])
    assert np.array_equal(decode(backend), expected)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_logits_do_not_depend_on_the_batch(data: st.DataObject) -> None:
    backend, rows, alone, page = make(OracleSettings(vocab_size=50)), [], [], 1
    for _ in range(data.draw(st.integers(1, 6))):
        tokens = data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=14))
        start = data.draw(st.integers(0, len(tokens) - 1))
        outputs = data.draw(st.sampled_from([0, 1, len(tokens) - start]))
        table = list(range(page, page + 4))
        page += 4
        salt = data.draw(st.sampled_from([b"", b"a"]))
        if start:
            backend.forward([make_row(tokens[:start], table, outputs=0, salt=salt)])
        rows.append(make_row(tokens, table, start=start, outputs=outputs, salt=salt))
        whole = make_row(tokens, range(4), outputs=len(tokens), salt=salt)
        logits = last_logits(make(OracleSettings(vocab_size=50)), whole)
        alone.append(logits[len(tokens) - outputs :])
    for output, logits in zip(backend.forward(rows), alone, strict=True):
        assert np.array_equal(present(output.logits), logits)


def test_an_empty_step_is_no_step() -> None:
    assert make().forward([]) == []


def test_forward_once_computes_what_forward_does_and_leaves_the_cache_alone(expected: np.ndarray) -> None:
    backend = make()
    fill(backend, PROMPT, TABLE)
    before = backend._kv.copy()
    inputs = [np.array([*PROMPT, 8], dtype=np.int32), np.array([3], dtype=np.int32)]
    first, second = backend.forward_once(inputs, frozenset({"hidden", "embedding", "logits"}))
    assert np.array_equal(backend._kv, before)
    assert np.array_equal(present(first.logits)[-1:], expected)
    assert present(first.hidden).shape == (11, backend.info.hidden_size)
    assert present(second.hidden).shape == (1, backend.info.hidden_size)
    assert np.linalg.norm(present(first.embedding)) == pytest.approx(1, abs=1e-6)
    assert present(first.embedding).dtype == np.float32
    (only,) = backend.forward_once(inputs[1:], frozenset({"embedding"}))
    assert only.hidden is None
    assert only.logits is None
    assert np.array_equal(present(only.embedding), present(second.embedding))


# A draft


@pytest.mark.parametrize("agreement", [0.0, 0.3, 0.7, 1.0])
def test_a_draft_agrees_at_its_rate(agreement: float) -> None:
    tokens = np.random.default_rng(1).integers(0, 257, 2000).astype(np.int32)
    want = frozenset({"logits"})
    target = present(make().forward_once([tokens], want)[0].logits)
    drafting = make(OracleSettings(draft_agreement=agreement, draft_seed=9))
    draft = present(drafting.forward_once([tokens], want)[0].logits)
    same = (target.argmax(axis=1) == draft.argmax(axis=1)).mean()
    assert same == pytest.approx(agreement + (1 - agreement) / 257, abs=0.04)


def test_fingerprints_tell_models_apart_but_not_their_clocks_and_faults() -> None:
    configs = [
        OracleSettings(),
        OracleSettings(vocab_size=300),
        OracleSettings(draft_agreement=0.5),
        OracleSettings(draft_agreement=0.5, draft_seed=1),
    ]
    assert len({OracleBackend(config).info.fingerprint for config in configs}) == len(configs)
    same = OracleBackend(OracleSettings(step_ms=1, exit_on_token=3, draft_seed=7)).info.fingerprint
    assert same == OracleBackend().info.fingerprint
    assert len(same) == 32


@pytest.mark.parametrize(
    "bad",
    [
        {"vocab_size": 0},
        {"context_length": 0},
        {"draft_agreement": 1.1},
        {"draft_agreement": float("nan")},
        {"draft_seed": -1},
        {"draft_seed": 1 << 64},
        {"step_ms": -1.0},
        {"step_ms": float("nan")},
        {"token_us": float("inf")},
        {"exit_after_steps": -1},
    ],
)
def test_a_bad_config_is_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        OracleSettings(**bad)  # type: ignore[arg-type]


# Its clock and its faults


def test_nan_harms_only_its_row() -> None:
    backend = make(OracleSettings(nan_on_token=13))
    healthy = make_row(PROMPT, TABLE, output=OutputMode.SAMPLE)
    (alone,) = backend.forward([healthy])
    sick = make_row([1, 13, 2], [9], output=OutputMode.SAMPLE)
    before, failed, after = backend.forward([healthy, sick, healthy])
    assert not failed.finite
    assert failed.tokens is None
    assert before.finite
    assert after.finite
    assert present(before.tokens).tolist() == present(after.tokens).tolist() == present(alone.tokens).tolist()


def test_a_step_takes_its_modelled_time() -> None:
    backend = make(OracleSettings(step_ms=5, token_us=1000))
    began = time.perf_counter()
    fill(backend, PROMPT, TABLE)
    assert time.perf_counter() - began >= 0.015


SCRIPT = """
from executor_service.backends.oracle_backend.oracle import OracleBackend
from executor_service.backends.oracle_backend.settings import OracleSettings
from tests.unit.executor.rows import make_row
backend = OracleBackend(OracleSettings(**{config}))
backend.allocate(4, 16)
for token in (1, 2, 3, 4):
    backend.forward([make_row([token], [1])])
    print(token, flush=True)
"""


@pytest.mark.parametrize("config", [{"exit_on_token": 3}, {"exit_after_steps": 2}])
def test_the_process_dies_where_it_is_told_to(config: dict[str, int]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(config=config)], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout.split()) == (EXIT_CODE, ["1", "2"])


def test_the_process_freezes_where_it_is_told_to_and_can_go_on() -> None:
    script = SCRIPT.format(config={"freeze_after_steps": 2})
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=30)
    assert (process.returncode, output.split()) == (0, ["1", "2", "3", "4"])


def test_a_row_may_bring_back_every_mode() -> None:
    backend = make()
    rows: list[ForwardRow] = [
        make_row(PROMPT, TABLE, output=output, top_k=5, outputs=outputs)
        for output, outputs in [
            (OutputMode.SAMPLE, 1),
            (OutputMode.TOP_K, 1),
            (OutputMode.FULL, 1),
            (OutputMode.NONE, 0),
        ]
    ]
    sample, top, full, nothing = backend.forward(rows)
    assert (
        present(sample.tokens).tolist()
        == [int(present(full.logits)[0].argmax())]
        == [int(present(top.top_ids)[0, 0])]
    )
    assert present(top.top_logprobs).shape == (1, 5)
    assert nothing.finite
    assert nothing.logits is None
