"""A backend that stores token ids as its "KV" and refuses to read anything but the right ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor_service.adapters.weights import AdapterWeights
from executor_service.backends.base import (
    ForwardOutput,
    ForwardRow,
    ModelDescription,
    Progress,
    RowOutput,
    Synchronous,
    TokenizerBundle,
)
from executor_service.contract.forward_view import WHOLE, ForwardView
from executor_service.contract.limits import Limits
from executor_service.contract.masks import allowed_tokens
from executor_service.contract.plan import NO_TOKENS, OutputMode, TokenIds

VOCAB = 97
EMPTY = NO_TOKENS
"""The very array: by it the engine knows rows that only decode."""


def ids(*values: int) -> TokenIds:
    return np.array(values, np.int32)


def next_token(history: Sequence[int], seed: int = 0) -> int:
    """What the fake samples after `history`: never one of the last ids, which tests use for others."""
    value = seed + 1
    for token in history:
        value = (value * 31 + int(token) + 7) % 1_000_003
    return value % (VOCAB - 7)


def continuation(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The next `count` tokens of an undisturbed run."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history, seed))
    return history[len(prompt) :]


def nearest(token: int, allowed: NDArray[np.bool_]) -> int:
    """The first allowed token from this one on, around the end of the vocabulary."""
    return int((token + np.roll(allowed, -token).argmax()) % VOCAB)


class FakeBackend(Synchronous):
    """Asserts that every position it reads holds the token that the row's history says."""

    def __init__(self, context_length: int = 256) -> None:
        self.info = ModelDescription(
            name="fake",
            architecture="fake",
            vocab_size=VOCAB,
            context_length=context_length,
            parameters=0,
            dtype="int32",
            device="cpu",
            hidden_size=1,
            layers=1,
            kv_bytes_per_token=4,
            eos_token_ids=(0,),
            fingerprint=b"fake",
            can_forward=True,
            has_tokenizer=False,
        )
        self.poisoned: set[int] = set()  # a row whose history ends with one of these is not finite
        self.forwards: list[list[int]] = []  # tokens fed per row, per forward
        self.copied: list[tuple[int, int]] = []
        self.slots: dict[int, object] = {}

    def load(self, progress: Progress) -> None:
        progress("weights", 1.0)

    def tokenizer(self) -> TokenizerBundle:
        raise AssertionError("the fake has no tokenizer")

    def allocate(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.kv = np.full((pages, page_size), -1, np.int64)

    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        self.forwards.append([len(row.tokens) for row in rows])
        for row in rows:
            for offset, token in enumerate(row.tokens):
                page, slot = divmod(row.start + offset, self.page_size)
                assert row.block_table[page] > 0, "page 0 is nobody's"
                self.kv[row.block_table[page], slot] = token
        return [self._row(row) for row in rows]

    def _row(self, row: ForwardRow) -> RowOutput:
        end = row.start + len(row.tokens)
        assert len(row.history) == end
        assert row.history[row.start :].tolist() == row.tokens.tolist()
        read = self.kv[row.block_table].reshape(-1)[:end]
        assert read.tolist() == row.history.tolist(), "stale KV"
        if int(row.history[-1]) in self.poisoned:
            return RowOutput(finite=False)
        assert row.slot < 0 or row.slot in self.slots
        if not row.outputs:
            return RowOutput()
        seed = row.sampling.seed
        history = row.history.tolist()
        tokens = ids(*(next_token(history[:p], seed) for p in range(end - row.outputs + 1, end + 1)))
        if row.masks is not None:
            allowed = allowed_tokens(row.masks, VOCAB)
            tokens = ids(*(nearest(token, one) for token, one in zip(tokens, allowed, strict=True)))
        if row.output is OutputMode.SAMPLE:
            logprobs = None if row.sampling.logprobs is None else -tokens.astype(np.float32)
            return RowOutput(tokens=tokens, logprobs=logprobs)
        if row.output is OutputMode.FULL:
            logits = np.zeros((len(tokens), VOCAB), np.float32)
            logits[np.arange(len(tokens)), tokens] = 1
            return RowOutput(logits=logits)
        top = np.repeat(tokens[:, None], row.top_k, axis=1)
        return RowOutput(top_ids=top, top_logprobs=-top.astype(np.float32))

    def prepare_adapter(self, weights: AdapterWeights) -> AdapterWeights:
        return weights

    def load_adapter(self, slot: int, prepared: object) -> None:
        self.slots[slot] = prepared

    def unload_adapter(self, slot: int) -> None:
        del self.slots[slot]

    def copy_page(self, source: int, target: int) -> None:
        self.copied.append((source, target))
        self.kv[target] = self.kv[source]

    def forward_once(
        self, inputs: Sequence[TokenIds], want: frozenset[str], view: ForwardView = WHOLE
    ) -> list[ForwardOutput]:
        return [ForwardOutput(hidden=np.zeros((len(x), 1), np.float32)) for x in inputs]

    def memory_bytes(self) -> dict[str, int]:
        return {"kv": self.kv.nbytes}

    def live_bytes(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


def limits(**changes: Any) -> Limits:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "context_length": 256,
        "page_size": 4,
        "total_pages": 64,
        "max_sequences": 32,
        "max_rows": 32,
        "max_step_tokens": 256,
        **changes,
    }
    return Limits(**values)
