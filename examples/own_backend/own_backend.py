"""A backend of one's own, for `--backend own`: a small model with a KV cache in numpy.

A token's keys and values are its embedding; a position's hidden state is the sum of all embeddings up to it,
weighted by `DECAY` to the power of their distances. Replace the arithmetic by yours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from executor_service.backends.base import (
    ForwardOutput,
    ForwardRow,
    ModelDescription,
    Progress,
    RowOutput,
    Synchronous,
    TokenizerBundle,
)
from executor_service.backends.byte_tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer
from executor_service.backends.numpy_sampler import sample_rows
from executor_service.backends.settings import fingerprint
from executor_service.contract.forward_view import WHOLE, ForwardView
from executor_service.contract.plan import TokenIds

DECAY = 0.9


def make(options: Mapping[str, str]) -> OwnBackend:
    """The backend of --backend-options. Raises ValueError for an option that it does not have."""
    if unknown := options.keys() - {"width"}:
        raise ValueError(f"unknown options: {', '.join(sorted(unknown))}; there is width")
    return OwnBackend(int(options.get("width", "16")))


class OwnBackend(Synchronous):
    """KV storage is fp32 [pages, page_size, width]."""

    def __init__(self, width: int) -> None:
        self.info = ModelDescription(
            name="own",
            architecture="own",
            vocab_size=VOCAB_SIZE,
            context_length=400,
            parameters=2 * VOCAB_SIZE * width,
            dtype="float32",
            device="cpu",
            hidden_size=width,
            layers=1,
            kv_bytes_per_token=4 * width,
            eos_token_ids=(EOS_ID,),
            fingerprint=fingerprint("own", {"width": width}),
            can_forward=True,
            supported_dtypes=("float32",),
        )

    def load(self, progress: Progress) -> None:
        """Draw the weights: embedding and head [vocabulary, width]."""
        self._embedding, self._head = np.random.default_rng(0).standard_normal(
            (2, self.info.vocab_size, self.info.hidden_size), dtype=np.float32
        )
        progress("weights", 1.0)

    def tokenizer(self) -> TokenizerBundle:
        return byte_tokenizer()

    def allocate(self, pages: int, page_size: int) -> None:
        self._kv = np.zeros((pages, page_size, self.info.hidden_size), dtype=np.float32)

    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        """Write the KV of all rows, then compute the outputs from the pages alone."""
        page_size = self._kv.shape[1]
        for row in rows:
            positions = np.arange(row.start, row.start + len(row.tokens))
            self._kv[row.block_table[positions // page_size], positions % page_size] = self._embedding[
                row.tokens
            ]
        ends = [row.start + len(row.tokens) for row in rows]
        logits = [
            self._logits(row, position)
            for row, end in zip(rows, ends, strict=True)
            for position in range(end - row.outputs, end)
        ]
        return sample_rows(np.array(logits, np.float32).reshape(-1, self.info.vocab_size), rows)

    def _logits(self, row: ForwardRow, position: int) -> NDArray[np.float32]:
        """Logits [vocabulary] at a position of the row's sequence."""
        positions, page_size = np.arange(position + 1), self._kv.shape[1]
        cached = self._kv[row.block_table[positions // page_size], positions % page_size]
        logits: NDArray[np.float32] = self._head @ _decayed(cached)
        return logits

    def copy_page(self, source: int, target: int) -> None:
        self._kv[target] = self._kv[source]

    def forward_once(
        self, inputs: Sequence[TokenIds], want: frozenset[str], view: ForwardView = WHOLE
    ) -> list[ForwardOutput]:
        """One result for each input, without the pages."""
        return [self._once(self._embedding[tokens], want, view.returned) for tokens in inputs]

    def _once(self, fed: NDArray[np.float32], want: frozenset[str], returned: slice) -> ForwardOutput:
        hidden = np.array([_decayed(fed[:end]) for end in range(1, len(fed) + 1)])
        mean = hidden.mean(axis=0)
        return ForwardOutput(
            hidden=hidden[returned] if "hidden" in want else None,
            embedding=mean / np.linalg.norm(mean) if "embedding" in want else None,
            logits=hidden[returned] @ self._head.T if "logits" in want else None,
        )

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": self._embedding.nbytes + self._head.nbytes, "kv": self._kv.nbytes}

    def close(self) -> None:
        self._kv = self._kv[:0]


def _decayed(embeddings: NDArray[np.float32]) -> NDArray[np.float32]:
    """The last position's hidden state [width], of all embeddings [positions, width]."""
    distances = np.arange(len(embeddings))[::-1]
    total: NDArray[np.float32] = np.power(DECAY, distances).astype(np.float32) @ embeddings
    return total
