"""Adapters of the reference executor agree with a dense model whose weights were changed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from executor_service.adapters.weights import PARENTS, AdapterWeights, LowRankChange, make_weights
from executor_service.backends.base import PromptOutputs
from executor_service.backends.numpy_sampler import log_softmax
from executor_service.backends.reference.paged_attention import PagedAttentionBackend, PagedAttentionConfig
from executor_service.contract.plan import OutputMode
from tests.support.untyped import present
from tests.unit.executor.rows import last_logits, make_row

CONFIG = PagedAttentionConfig(vocab_size=23, heads=6, kv_heads=3, head_dim=5)
EMBEDDED, HEADS = 15, 30
SHAPES = {
    "q_proj": (EMBEDDED, HEADS),
    "k_proj": (EMBEDDED, EMBEDDED),
    "v_proj": (EMBEDDED, EMBEDDED),
    "o_proj": (HEADS, HEADS),
}
TOKENS = [3, 17, 4, 4, 22, 9, 0, 3, 11]
TABLE = [9, 2, 31]


def adapter(seed: int, *modules: str, rank: int = 2) -> AdapterWeights:
    rng = np.random.default_rng(seed)
    changes = []
    for module in modules:
        inputs, outputs = SHAPES[module]
        a, b = rng.standard_normal((rank, inputs)), rng.standard_normal((outputs, rank))
        changes.append(LowRankChange(0, module, a.astype(np.float32), b.astype(np.float16)))
    return make_weights(rank, 0.5, changes, b"model")


def make(*adapters: AdapterWeights) -> PagedAttentionBackend:
    backend = PagedAttentionBackend(CONFIG)
    backend.allocate(40, 4)
    for slot, weights in enumerate(adapters):
        backend.load_adapter(slot, backend.prepare_adapter(weights))
    return backend


def dense_hidden(tokens: list[int], weights: AdapterWeights) -> np.ndarray:
    """Hidden states of a model whose projections are matrices with the change added to them."""
    group = CONFIG.heads // CONFIG.kv_heads
    repeat = np.kron(np.kron(np.eye(CONFIG.kv_heads), np.ones((group, 1))), np.eye(CONFIG.head_dim))
    matrices = {
        "q_proj": repeat, "k_proj": np.eye(EMBEDDED), "v_proj": np.eye(EMBEDDED), "o_proj": np.eye(HEADS),
    }  # fmt: skip
    for change in weights.changes:
        matrices[change.module] = matrices[change.module] + weights.scale * (
            change.b.astype(np.float64) @ change.a.astype(np.float64)
        )
    x = np.eye(EMBEDDED)[np.array(tokens) % EMBEDDED]
    q, k, v = (x @ matrices[name].T for name in ("q_proj", "k_proj", "v_proj"))
    hidden = []
    for position in range(len(tokens)):
        heads = []
        for head in range(CONFIG.heads):
            own = slice(head * CONFIG.head_dim, (head + 1) * CONFIG.head_dim)
            kv = slice(head // group * CONFIG.head_dim, (head // group + 1) * CONFIG.head_dim)
            scores = np.exp(k[: position + 1, kv] @ q[position, own] / math.sqrt(CONFIG.head_dim))
            heads.append(scores / scores.sum() @ v[: position + 1, kv])
        hidden.append(matrices["o_proj"] @ np.concatenate(heads))
    return np.array(hidden)


def dense(tokens: list[int], weights: AdapterWeights) -> np.ndarray:
    """Every position's logits."""
    hidden = dense_hidden(tokens, weights)
    logits = np.zeros((len(tokens), CONFIG.vocab_size))
    for position, vector in enumerate(hidden):
        np.add.at(logits[position], np.arange(HEADS) % CONFIG.vocab_size, vector)
    return logits


@pytest.mark.parametrize("modules", [(name,) for name in SHAPES] + [tuple(SHAPES)])
def test_an_adapter_changes_what_the_same_change_of_the_weights_does(modules: tuple[str, ...]) -> None:
    weights = adapter(1, *modules)
    row = replace(make_row(TOKENS, TABLE, outputs=len(TOKENS)), slot=0)
    paged = last_logits(make(weights), row)
    np.testing.assert_allclose(paged, dense(TOKENS, weights), rtol=0, atol=1e-5)
    assert not np.allclose(paged, dense(TOKENS, adapter(1)), atol=1e-2)


def test_scores_and_vectors_are_those_of_the_changed_weights() -> None:
    weights = adapter(1, *SHAPES)
    plain = replace(make_row(TOKENS, TABLE, outputs=0, output=OutputMode.NONE), slot=0)
    asked = PromptOutputs(4, np.array(TOKENS[4:], np.int32), last=True, total=True)
    (found,) = make(weights).forward([replace(plain, prompt=asked)])
    logprobs = log_softmax(dense(TOKENS, weights).astype(np.float32))
    expected = logprobs[np.arange(3, len(TOKENS) - 1), TOKENS[4:]]
    np.testing.assert_allclose(present(found.scores).logprobs, expected, rtol=0, atol=1e-5)
    hidden = dense_hidden(TOKENS, weights)
    np.testing.assert_allclose(present(found.hidden), hidden[-1], rtol=0, atol=1e-5)
    np.testing.assert_allclose(present(found.hidden_sum), hidden.sum(0), rtol=0, atol=1e-5)


def test_a_row_is_bitwise_the_same_alone_and_among_rows_of_other_adapters() -> None:
    adapters = adapter(1, "q_proj", "v_proj"), adapter(2, "k_proj", "o_proj", rank=5)
    slots = (0, -1, 1, 0)
    rows = [
        replace(make_row([*TOKENS, i], [3 * i + 1, 3 * i + 2, 3 * i + 3], outputs=3), slot=slot)
        for i, slot in enumerate(slots)
    ]
    together = make(*adapters).forward(rows)
    for row, output in zip(rows, together, strict=True):
        assert np.array_equal(present(output.logits), last_logits(make(*adapters), row))


def test_keys_and_values_are_those_of_the_adapter_that_computed_them() -> None:
    weights = adapter(1, "k_proj", "v_proj")
    expected = last_logits(make(weights), replace(make_row(TOKENS, TABLE), slot=0))
    for slot, same in ((0, True), (-1, False)):
        backend = make(weights)
        first = make_row(TOKENS[:8], TABLE, outputs=0, output=OutputMode.NONE)
        backend.forward([replace(first, slot=slot)])
        last = last_logits(backend, replace(make_row(TOKENS, TABLE, start=8), slot=0))
        assert np.array_equal(last, expected) is same


def test_a_slot_holds_what_was_brought_to_it_last() -> None:
    backend, other = make(adapter(1, "q_proj", rank=5)), adapter(2, "q_proj", rank=1)
    backend.load_adapter(0, backend.prepare_adapter(other))
    row = replace(make_row(TOKENS, TABLE), slot=0)
    assert np.array_equal(last_logits(backend, row), last_logits(make(other), row))


def test_its_projections_are_named_as_adapters_name_them() -> None:
    target = present(make().info.adapters)
    assert target.linears == {(0, name): shape for name, shape in SHAPES.items()}
    assert {name for _, name in target.linears} <= set(PARENTS)
