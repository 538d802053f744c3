"""The reference executor agrees with a dense computation, however its KV is paged and chunked."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_service.backends.reference.paged_attention import PagedAttentionBackend, PagedAttentionConfig
from executor_service.contract.plan import OutputMode
from tests.support.untyped import present
from tests.unit.executor.rows import last_logits, make_row

PAGE = 4
SMALL = PagedAttentionConfig(vocab_size=23, heads=6, kv_heads=3, head_dim=5)
WANT = frozenset({"hidden", "embedding", "logits"})


def make(config: PagedAttentionConfig = SMALL) -> PagedAttentionBackend:
    backend = PagedAttentionBackend(config)
    backend.load(lambda what, fraction: None)
    backend.allocate(40, PAGE)
    return backend


def dense_logits(tokens: list[int], config: PagedAttentionConfig) -> np.ndarray:
    """Every position's logits, from the definition, in plain Python."""
    size = config.kv_heads * config.head_dim
    group = config.heads // config.kv_heads
    logits = np.zeros((len(tokens), config.vocab_size))
    for position in range(len(tokens)):
        for head in range(config.heads):
            low = (head // group) * config.head_dim
            slices = [np.eye(size)[token % size][low : low + config.head_dim] for token in tokens]
            query = slices[position]
            weights = [math.exp(query @ key / math.sqrt(config.head_dim)) for key in slices[: position + 1]]
            out = sum(w * value for w, value in zip(weights, slices, strict=False)) / sum(weights)
            for i, value in enumerate(out):
                logits[position, (head * config.head_dim + i) % config.vocab_size] += value
    return logits


tokens_of_small = st.lists(st.integers(0, SMALL.vocab_size - 1), min_size=1, max_size=20)


@settings(max_examples=40, deadline=None)
@given(tokens_of_small)
def test_paged_attention_agrees_with_the_dense_reference(tokens: list[int]) -> None:
    paged = last_logits(make(), make_row(tokens, [9, 2, 31, 5, 14], outputs=len(tokens)))
    assert paged.dtype == np.float32
    np.testing.assert_allclose(paged, dense_logits(tokens, SMALL), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        PagedAttentionConfig(),
        PagedAttentionConfig(vocab_size=3, heads=2, kv_heads=1, head_dim=4),  # i mod V wraps
        PagedAttentionConfig(heads=4, kv_heads=4, head_dim=8),  # multi-head
        PagedAttentionConfig(heads=4, kv_heads=1, head_dim=8),  # multi-query
    ],
)
def test_it_agrees_for_every_shape_of_heads(config: PagedAttentionConfig) -> None:
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 11).tolist()
    paged = last_logits(make(config), make_row(tokens, [9, 2, 31], outputs=11))
    np.testing.assert_allclose(paged, dense_logits(tokens, config), rtol=0, atol=1e-6)


def test_two_tokens_by_hand() -> None:
    """Token 0, then 1, one head of size 2: weights e^0 and e^(1/sqrt 2) on each one's own index."""
    config = PagedAttentionConfig(vocab_size=2, heads=1, kv_heads=1, head_dim=2)
    logits = last_logits(make(config), make_row([0, 1], [1]))
    own = math.exp(1 / math.sqrt(2)) / (1 + math.exp(1 / math.sqrt(2)))
    np.testing.assert_allclose(logits, [[1 - own, own]], atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(tokens_of_small, st.data())
def test_chunks_batch_and_pages_change_no_bit(tokens: list[int], data: st.DataObject) -> None:
    whole = last_logits(make(), make_row(tokens, range(5), outputs=len(tokens)))
    backend, table, start = make(), data.draw(st.permutations(range(1, 39)))[:5], 0
    neighbour = make_row([1, 2, 3], [39], outputs=3)
    while start < len(tokens):
        end = data.draw(st.integers(start + 1, len(tokens)))
        _, output = backend.forward(
            [neighbour, make_row(tokens[:end], table, start=start, outputs=end - start)]
        )
        assert np.array_equal(present(output.logits), whole[start:end])
        start = end


def test_a_stale_page_and_a_missing_one_change_the_logits() -> None:
    tokens, backend = [1, 2, 3, 4, 5, 6, 7, 8, 9], make()
    expected = last_logits(backend, make_row(tokens, [1, 2, 3]))
    backend.forward([make_row([11, 12, 13, 14], [4], outputs=0)])
    for table in ([4, 2, 3], [1, 5, 3]):
        assert not np.array_equal(last_logits(backend, make_row(tokens, table, start=8)), expected)


def test_a_copied_page_serves_a_fork() -> None:
    tokens, backend = [1, 2, 3, 4, 5, 6], make()
    expected = last_logits(backend, make_row(tokens, [1, 2]))
    backend.copy_page(2, 8)
    assert np.array_equal(last_logits(backend, make_row(tokens, [1, 8], start=5)), expected)


def test_forward_once_computes_what_forward_does() -> None:
    backend, tokens = make(), [3, 1, 22, 7, 3]
    expected = last_logits(backend, make_row(tokens, [1, 2], outputs=5))
    output, other = backend.forward_once([np.array(tokens), np.array([4])], WANT)
    assert np.array_equal(present(output.logits), expected)
    assert present(output.hidden).shape == (5, backend.info.hidden_size)
    assert present(other.logits).shape == (1, 23)
    assert np.linalg.norm(present(output.embedding)) == pytest.approx(1, abs=1e-6)
    mean = present(output.hidden).mean(axis=0)
    np.testing.assert_allclose(present(output.embedding), mean / np.linalg.norm(mean), atol=1e-6)


def test_it_samples_and_allows_empty_steps_and_rows_without_output() -> None:
    backend = make()
    assert backend.forward([]) == []
    nothing, sampled = backend.forward(
        [make_row([1], [1], outputs=0, output=OutputMode.NONE), make_row([2], [2], output=OutputMode.SAMPLE)]
    )
    assert nothing.finite
    assert nothing.tokens is None
    assert present(sampled.tokens).tolist() == [2]


@pytest.mark.parametrize("bad", [{"vocab_size": 0}, {"head_dim": -1}, {"heads": 3, "kv_heads": 2}])
def test_a_bad_config_is_refused_by_name(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        PagedAttentionConfig(**bad)


def test_the_fingerprint_names_the_shape() -> None:
    assert make().info.fingerprint != make(PagedAttentionConfig()).info.fingerprint
    assert make().info.fingerprint == make().info.fingerprint
