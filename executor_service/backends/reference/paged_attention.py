"""The reference model: paged attention over identity projections, small enough to check by hand.

A token's embedding is one-hot: 1 at index (id mod kv_heads * head_dim). Queries, keys and values
are the embedding itself, cut into heads of `head_dim`; each KV head serves heads / kv_heads query
heads (grouped-query attention, Ainslie et al. 2023). One causal softmax attention layer, scaled by
1 / sqrt(head_dim), reads the pages; output i of the concatenated heads is added to logit i mod V.
There is no positional encoding: permuting a token's context does not change its logits.

An adapter changes the identity projections as it would change weights: q_proj makes the heads' queries of an
embedding, k_proj and v_proj its keys and values, and o_proj is after the heads. With x its input, a
projection's output is then x + scale * b @ (a @ x); queries begin as the embedding's heads, each repeated for
its group.

Each position is computed separately in float64, by operations whose shapes depend on its
position alone: results are bitwise independent of batch and chunks, and equal logits stay equal in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor_service.adapters.weights import AdapterTarget, AdapterWeights, as_float32
from executor_service.backends.base import (
    ForwardOutput,
    ForwardRow,
    ModelDescription,
    ModelError,
    Progress,
    RowOutput,
    Synchronous,
    TokenizerBundle,
)
from executor_service.backends.byte_tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer
from executor_service.backends.numpy_sampler import sample_rows
from executor_service.backends.prompt_outputs import add_prompt_outputs, states_of
from executor_service.backends.settings import fingerprint
from executor_service.contract.forward_view import WHOLE, ForwardView
from executor_service.contract.plan import TokenIds


@dataclass(frozen=True, slots=True)
class PagedAttentionConfig:
    """Shape of the reference model. Raises ValueError where the sizes don't fit together."""

    vocab_size: int = VOCAB_SIZE
    context_length: int = 32768  # tokens
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")


@dataclass(frozen=True, slots=True)
class ProjectionFactors:
    """An adapter's factors (a, b) by projection, float64; b has the scale in it."""

    factors: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]


class PagedAttentionBackend(Synchronous):
    """The reference model as a `Backend`; KV in fp32 pages."""

    def __init__(self, config: PagedAttentionConfig | None = None) -> None:
        self._config = config = config or PagedAttentionConfig()
        has_text = config.vocab_size >= VOCAB_SIZE
        self.info = ModelDescription(
            name="paged-attention",
            architecture="paged-attention",
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            parameters=0,
            dtype="float32",
            device="cpu",
            hidden_size=config.heads * config.head_dim,
            layers=1,
            kv_bytes_per_token=2 * config.kv_heads * config.head_dim * 4,
            eos_token_ids=(EOS_ID,) if has_text else (),
            fingerprint=fingerprint("paged-attention", asdict(config)),
            can_forward=True,
            can_mask_forward=True,
            can_score=True,
            can_pool=True,
            has_tokenizer=has_text,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_size=config.head_dim,
            supported_dtypes=("float32",),
            adapters=AdapterTarget(_linears(config)),
        )
        self._page_size = 0
        self._slots: dict[int, ProjectionFactors] = {}
        self._keys = self._values = _pages(config, 0, 0)

    def load(self, progress: Progress) -> None:
        """Report progress; there are no weights to read."""
        progress("paged-attention has no weights", 1.0)

    def tokenizer(self) -> TokenizerBundle:
        """The byte tokenizer. Raises ModelError when the vocabulary is too small for it."""
        if not self.info.has_tokenizer:
            raise ModelError(f"a vocabulary of {self.info.vocab_size} has no room for the byte tokenizer")
        return byte_tokenizer()

    def allocate(self, pages: int, page_size: int) -> None:
        """Allocate the pages of keys and of values, [pages, page_size, kv_heads, head_dim] each."""
        self._page_size = page_size
        self._keys, self._values = (_pages(self._config, pages, page_size) for _ in range(2))

    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        """Write every row's keys and values, then compute attention for every output position."""
        for row in rows:
            positions = np.arange(row.start, row.start + len(row.tokens))
            pages = row.block_table[positions // self._page_size]
            slots = positions % self._page_size
            embedded = self._embed(row.tokens)
            for name, storage in (("k_proj", self._keys), ("v_proj", self._values)):
                storage[pages, slots] = embedded + self._change(name, embedded, row.slot).reshape(
                    embedded.shape
                )
        hidden = [self._row_hidden(row) for row in rows]
        logits = [self._logits(h[len(h) - row.outputs :]) for h, row in zip(hidden, rows, strict=True)]
        outputs = sample_rows(np.concatenate(logits) if logits else self._logits([]), rows)
        return [
            add_prompt_outputs(row, output, np.array(h), self._config.vocab_size, partial(self._logits_of, h))
            for row, output, h in zip(rows, outputs, hidden, strict=True)
        ]

    def prepare_adapter(self, weights: AdapterWeights) -> ProjectionFactors:
        """The factors in float64, the scale in the second one."""
        return ProjectionFactors(
            {
                change.module: (
                    as_float32(change.a).astype(np.float64),
                    as_float32(change.b).astype(np.float64) * weights.scale,
                )
                for change in weights.changes
            }
        )

    def load_adapter(self, slot: int, prepared: ProjectionFactors) -> None:
        """Let rows of this slot project with these factors."""
        self._slots[slot] = prepared

    def unload_adapter(self, slot: int) -> None:
        """Forget the slot's factors."""
        del self._slots[slot]

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page's keys and values."""
        self._keys[target] = self._keys[source]
        self._values[target] = self._values[source]

    def forward_once(
        self, inputs: Sequence[TokenIds], want: frozenset[str], view: ForwardView = WHOLE
    ) -> list[ForwardOutput]:
        """Hidden states are the concatenated heads; the embedding is their mean, L2-normalized.

        Positions change nothing: the model has no positional encoding.
        """
        return [self._forward_one(tokens, want, view) for tokens in inputs]

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the KV pages; there are no weights."""
        return {"weights": 0, "kv": self._keys.nbytes + self._values.nbytes}

    def close(self) -> None:
        """Free the pages."""
        self._keys = self._values = _pages(self._config, 0, 0)

    def _embed(self, tokens: TokenIds) -> NDArray[np.float32]:
        """One-hot embeddings as heads, [q, kv_heads, head_dim]."""
        config = self._config
        size = config.kv_heads * config.head_dim
        embedding = np.zeros((len(tokens), size), dtype=np.float32)
        embedding[np.arange(len(tokens)), tokens % size] = 1.0
        return embedding.reshape(len(tokens), config.kv_heads, config.head_dim)

    def _queries(self, embedded: NDArray[np.float32], slot: int) -> NDArray[np.float64]:
        """The queries of embeddings [q, kv_heads, head_dim], as heads [q, heads, head_dim]."""
        config = self._config
        queries = np.repeat(embedded, config.heads // config.kv_heads, axis=1).astype(np.float64)
        return queries + self._change("q_proj", embedded, slot).reshape(queries.shape)

    def _change(self, name: str, inputs: NDArray[Any], slot: int) -> NDArray[np.float64]:
        """What the adapter in a slot adds after a projection of inputs [q, ...]: [q, outputs]."""
        outputs = _linears(self._config)[0, name][1]
        factors = self._slots[slot].factors.get(name) if slot >= 0 else None
        if factors is None:
            return np.zeros((len(inputs), outputs))
        a, b = factors
        return np.array([b @ (a @ vector.reshape(-1).astype(np.float64)) for vector in inputs])

    def _row_hidden(self, row: ForwardRow) -> list[NDArray[np.float64]]:
        """The hidden states of the row's `states_of` last positions, from the KV in its pages."""
        states = states_of(row)
        if states == 0:
            return []
        end = row.start + len(row.tokens)
        pages = row.block_table[: -(-end // self._page_size)]
        shape = (-1, self._config.kv_heads, self._config.head_dim)
        keys, values = self._keys[pages].reshape(shape), self._values[pages].reshape(shape)
        queries = self._queries(self._embed(row.tokens[-states:]), row.slot)
        hidden = [
            self._attend(query, keys[:length], values[:length])
            for query, length in zip(queries, range(end - states + 1, end + 1), strict=True)
        ]
        changes = self._change("o_proj", np.array(hidden), row.slot)
        return [vector + change for vector, change in zip(hidden, changes, strict=True)]

    def _attend(
        self, query: NDArray[np.float64], keys: NDArray[np.float32], values: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """Attention of one position: query [heads, d], keys and values [n, kv, d] -> [heads * d]."""
        config = self._config
        grouped = query.reshape(config.kv_heads, -1, config.head_dim)  # [kv, group, d]
        scores = grouped @ keys.transpose(1, 2, 0) / np.sqrt(config.head_dim)  # [kv, group, n]
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed: NDArray[np.float64] = weights @ values.transpose(1, 0, 2)  # [kv, group, d]
        return mixed.reshape(-1)

    def _logits(self, hidden: Sequence[NDArray[np.float64]]) -> NDArray[np.float32]:
        """logits[i mod V] += hidden[i] at each position, [q, V]."""
        logits = np.zeros((len(hidden), self._config.vocab_size))
        for position, vector in enumerate(hidden):
            np.add.at(logits[position], np.arange(len(vector)) % self._config.vocab_size, vector)
        return logits.astype(np.float32)

    def _logits_of(self, hidden: Sequence[NDArray[np.float64]], part: slice) -> NDArray[np.float32]:
        return self._logits(hidden[part])

    def _forward_one(self, tokens: TokenIds, want: frozenset[str], view: ForwardView) -> ForwardOutput:
        embedded = self._embed(tokens)
        hidden = []
        for index, query in enumerate(self._queries(embedded, slot=-1)):
            seen = embedded[: index + 1][view.seen(index, index + 1)[0]]
            hidden.append(self._attend(query, seen, seen))
        mean, part = np.mean(hidden, axis=0), hidden[view.returned]
        return ForwardOutput(
            hidden=np.array(part, dtype=np.float32) if "hidden" in want else None,
            embedding=(mean / np.linalg.norm(mean)).astype(np.float32) if "embedding" in want else None,
            logits=self._logits(part) if "logits" in want else None,
        )


def _linears(config: PagedAttentionConfig) -> dict[tuple[int, str], tuple[int, int]]:
    """Inputs and outputs of the projections."""
    embedded, heads = config.kv_heads * config.head_dim, config.heads * config.head_dim
    return {
        (0, "q_proj"): (embedded, heads),
        (0, "k_proj"): (embedded, embedded),
        (0, "v_proj"): (embedded, embedded),
        (0, "o_proj"): (heads, heads),
    }


def _pages(config: PagedAttentionConfig, pages: int, page_size: int) -> NDArray[np.float32]:
    return np.zeros((pages, page_size, config.kv_heads, config.head_dim), dtype=np.float32)
