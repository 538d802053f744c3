"""A synthetic model for tests: each logit is an exact hash of the sequence's cached tokens.

One uint64 per token replaces keys and values, the *state* of the sequence up to that token:

    state[p] = origin(salt) + sum over j <= p of a[j] * (token[j] + 1 + adapter[j])
                                                                           written when token p is computed
    content[p] = mix64(sum over j <= p of b[j] * state[j])                 read back at every step
    logits[p, id] = hash(content[p], id), uniform in [-4, 4]

with fixed odd coefficients a and b per position, modulo 2^64. adapter[j] is the beginning of the fingerprint
of the adapter in the row's slot, when token j was computed; 0: it had none. As in a real model, a token's
cached state depends on all tokens before it and their adapters, on its position and on the salt, and a logit
depends on all cached states: a stale, swapped, wrongly shared or missing slot, of pages or of adapters,
changes the sampled tokens at once. Freed pages keep their content, so that reading one shows. Integer
arithmetic is exact: results do not depend on batch, chunks or page layout.

As a draft model (`draft_agreement` below 1), the oracle has the target's logits at a pseudo-random share of
positions, chosen by content, and different ones elsewhere. The other settings model step time and inject
faults.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from executor_service.adapters.weights import AdapterTarget, AdapterWeights
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
from executor_service.backends.oracle_backend.settings import OracleSettings
from executor_service.backends.prompt_outputs import add_prompt_outputs, states_of
from executor_service.backends.settings import fingerprint
from executor_service.contract import noise
from executor_service.contract.forward_view import WHOLE, ForwardView
from executor_service.contract.plan import TokenIds

EXIT_CODE = 134
"""Exit status of injected crashes: what a shell reports of a process that SIGABRT killed."""

HIDDEN_SIZE = 16

Words = NDArray[np.uint64]
Indices = NDArray[np.int64]


class OracleBackend(Synchronous):
    """The oracle as a `Backend`; KV is a uint64 array [pages, page_size]."""

    max_piece_tokens = 2048  # as on a GPU, which the oracle simulates

    def __init__(self, config: OracleSettings | None = None) -> None:
        self._config = config = config or OracleSettings()
        has_text = config.vocab_size >= VOCAB_SIZE
        is_draft = config.draft_agreement < 1.0
        draft = [config.draft_agreement, config.draft_seed] if is_draft else None
        self.info = ModelDescription(
            name="oracle-draft" if is_draft else "oracle",
            architecture="oracle",
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            parameters=0,
            dtype="uint64",
            device="cpu",
            hidden_size=HIDDEN_SIZE,
            layers=1,
            kv_bytes_per_token=8,
            eos_token_ids=(EOS_ID,) if has_text else (),
            fingerprint=fingerprint("oracle", {"vocab_size": config.vocab_size, "draft": draft}),
            can_forward=True,
            can_score=True,
            can_pool=True,
            has_tokenizer=has_text,
            supported_dtypes=("uint64",),
            adapters=AdapterTarget(),
        )
        self._slots: dict[int, int] = {}  # the number of each slot's adapter
        self._steps = 0
        self._kv = np.zeros((0, 1), dtype=np.uint64)
        self._token_coefficients = _coefficients(1, config.context_length)
        self._state_coefficients = _coefficients(2, config.context_length)
        self._state_pages = self._state_coefficients.reshape(-1, 1)

    def load(self, progress: Progress) -> None:
        """Report progress; there are no weights to read."""
        progress("the oracle has no weights", 1.0)

    def tokenizer(self) -> TokenizerBundle:
        """The byte tokenizer. Raises ModelError when the vocabulary is too small for it."""
        if not self.info.has_tokenizer:
            raise ModelError(f"a vocabulary of {self.info.vocab_size} has no room for the byte tokenizer")
        return byte_tokenizer()

    def allocate(self, pages: int, page_size: int) -> None:
        """Allocate the KV pages, filled with zeros."""
        self._kv = np.zeros((pages, page_size), dtype=np.uint64)
        whole_pages = -(-self._config.context_length // page_size)
        self._state_pages = _coefficients(2, whole_pages * page_size).reshape(whole_pages, page_size)

    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        """Write the states of all rows' tokens, then compute logits from all states of each row's context."""
        began = time.perf_counter()
        if not rows:
            return []
        batch = _FlatRows(rows, self._kv.shape[1])
        self._inject_process_faults(batch.tokens)
        self._write(batch, rows)
        contents = self._read(batch)
        logits = self._logits(contents if batch.sampled is None else contents[batch.sampled])
        masked_later = any(row.masked_later for row in rows)
        if masked_later:
            self._pass_time(began, len(batch.tokens))
            logits = self._take_masks(rows, logits)
        self._inject_nan(logits, rows)
        outputs = self._sample(logits, rows)
        if batch.sampled is not None:
            self._add_prompt_outputs(rows, outputs, np.split(contents, np.cumsum(batch.states)[:-1]))
        if not masked_later:
            self._pass_time(began, len(batch.tokens))
        return outputs

    def _sample(self, logits: NDArray[np.float32], rows: Sequence[ForwardRow]) -> list[RowOutput]:
        """One output per row; `logits` [sum of outputs, V] may be changed. All rows have their masks."""
        return sample_rows(logits, rows)

    def _add_prompt_outputs(
        self, rows: Sequence[ForwardRow], outputs: list[RowOutput], contents: Sequence[Words]
    ) -> None:
        """Add what the rows' `prompt`s ask for; contents: of each row's `states_of` last positions."""
        for index, (row, mine) in enumerate(zip(rows, contents, strict=True)):
            if row.prompt is None:
                continue
            hidden = _hidden(mine)
            poisoned = self._poisoned(row.history)[len(row.history) - len(mine) :]
            hidden[poisoned] = np.nan
            outputs[index] = add_prompt_outputs(
                row, outputs[index], hidden, self._config.vocab_size, self._poisoned_logits(mine, poisoned)
            )

    def _poisoned_logits(
        self, contents: Words, poisoned: NDArray[np.bool_]
    ) -> Callable[[slice], NDArray[np.float32]]:
        def logits(part: slice) -> NDArray[np.float32]:
            found = self._logits(contents[part])
            found[poisoned[part]] = np.nan
            return found

        return logits

    def _poisoned(self, tokens: TokenIds) -> NDArray[np.bool_]:
        """The positions at which the setting `nan_on_token` makes logits NaN."""
        if self._config.nan_on_token is None:
            return np.zeros(len(tokens), dtype=bool)
        return np.maximum.accumulate(tokens == self._config.nan_on_token)

    def _take_masks(self, rows: Sequence[ForwardRow], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Set the masks that come later; returns the logits of the outputs that are left.

        Here none come; a subclass whose steps overlap overrides this.
        """
        raise RuntimeError("steps do not overlap here")

    def prepare_adapter(self, weights: AdapterWeights) -> AdapterWeights:
        """The weights as they are: only their fingerprint is used."""
        return weights

    def load_adapter(self, slot: int, prepared: AdapterWeights) -> None:
        """Let rows of this slot compute with the adapter's number."""
        self._slots[slot] = int.from_bytes(prepared.fingerprint[:8], "little")

    def unload_adapter(self, slot: int) -> None:
        """Forget the slot's number."""
        del self._slots[slot]

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page's states."""
        self._kv[target] = self._kv[source]

    def forward_once(
        self, inputs: Sequence[TokenIds], want: frozenset[str], view: ForwardView = WHOLE
    ) -> list[ForwardOutput]:
        """Hidden states are hashes of the content; the embedding is their mean, L2-normalized."""
        began = time.perf_counter()
        tokens = np.concatenate(inputs) if inputs else np.zeros(0, dtype=np.int32)
        self._inject_process_faults(tokens)
        outputs = [self._forward_one(one, want, view.returned) for one in inputs]
        self._pass_time(began, len(tokens))
        return outputs

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the KV pages; there are no weights."""
        return {"weights": 0, "kv": self._kv.nbytes}

    def close(self) -> None:
        """Free the pages."""
        self._kv = np.zeros((0, 1), dtype=np.uint64)

    def _write(self, batch: _FlatRows, rows: Sequence[ForwardRow]) -> None:
        """Write each input token's state; the state before a row's first token is read from its page."""
        before = np.fromiter((_origin(row.salt) for row in rows), np.uint64, len(rows))
        continued = np.flatnonzero(batch.starts)
        before[continued] = self._kv[batch.slots(continued, batch.starts[continued] - 1)]
        terms = batch.tokens.astype(np.uint64) + np.uint64(1)
        if any(row.slot >= 0 for row in rows):
            numbers = (self._slots[row.slot] if row.slot >= 0 else 0 for row in rows)
            terms += np.repeat(np.fromiter(numbers, np.uint64, len(rows)), batch.counts)
        fed = self._token_coefficients[batch.positions] * terms
        states = _running_sums(fed, batch.counts) + np.repeat(before, batch.counts)
        self._kv[batch.slots(batch.row_of_token, batch.positions)] = states

    def _read(self, batch: _FlatRows) -> Words:
        """The content hashes of the last `states` positions of each row, in order, from the pages alone."""
        with_output = np.flatnonzero(batch.states)
        if not len(with_output):
            return np.zeros(0, dtype=np.uint64)
        # The terms up to a row's first output position, whole pages at a time ...
        outputs = batch.states[with_output]
        first = (batch.starts + batch.counts)[with_output] - outputs
        page_size = self._kv.shape[1]
        pages = first // page_size + 1
        page_in_row = _ranges(pages)
        table_index = np.repeat(batch.table_starts[with_output], pages) + page_in_row
        terms = self._kv[batch.tables[table_index]]
        terms *= self._state_pages[page_in_row]
        last_pages = np.cumsum(pages) - 1
        terms[last_pages] *= np.arange(page_size) <= (first % page_size)[:, None]
        page_sums = terms.sum(axis=1, dtype=np.uint64)
        sums = np.add.reduceat(page_sums, last_pages - pages + 1)
        # ... then one more term for each later output position.
        later = outputs - 1
        increments = np.zeros(int(outputs.sum()), dtype=np.uint64)
        firsts = np.cumsum(outputs) - outputs
        increments[firsts] = sums
        if later.any():
            positions = np.repeat(first + 1, later) + _ranges(later)
            states = self._kv[batch.slots(np.repeat(with_output, later), positions)]
            is_later = np.ones(len(increments), dtype=bool)
            is_later[firsts] = False
            increments[is_later] = states * self._state_coefficients[positions]
        return noise.mix64_array(_running_sums(increments, outputs))

    def _logits(self, contents: Words) -> NDArray[np.float32]:
        """Logits [outputs, V] in [-4, 4] from content hashes [outputs]."""
        config = self._config
        if config.draft_agreement < 1.0:
            other = noise.mix64_array(contents ^ np.uint64(noise.mix64(config.draft_seed + 1)))
            coin = (noise.mix64_array(other) >> np.uint64(11)).astype(np.float64) * 2.0**-53
            contents = np.where(coin < config.draft_agreement, contents, other)
        return _uniform(contents, config.vocab_size)

    def _forward_one(self, tokens: TokenIds, want: frozenset[str], returned: slice) -> ForwardOutput:
        fed = self._token_coefficients[: len(tokens)] * (tokens.astype(np.uint64) + np.uint64(1))
        states = np.cumsum(fed, dtype=np.uint64) + np.uint64(_origin(b""))
        sums = np.cumsum(self._state_coefficients[: len(tokens)] * states, dtype=np.uint64)
        contents = noise.mix64_array(sums)
        hidden, logits = _hidden(contents), self._logits(contents)
        poisoned = self._poisoned(tokens)
        hidden[poisoned] = logits[poisoned] = np.nan
        mean = hidden.mean(axis=0)
        return ForwardOutput(
            hidden=hidden[returned] if "hidden" in want else None,
            embedding=mean / np.linalg.norm(mean) if "embedding" in want else None,
            logits=logits[returned] if "logits" in want else None,
        )

    def _inject_process_faults(self, tokens: TokenIds) -> None:
        config = self._config
        if config.exit_on_token is not None and (tokens == config.exit_on_token).any():
            os._exit(EXIT_CODE)
        if config.exit_after_steps is not None and self._steps >= config.exit_after_steps:
            os._exit(EXIT_CODE)
        if config.freeze_after_steps is not None and self._steps == config.freeze_after_steps:
            os.kill(os.getpid(), signal.SIGSTOP)
        self._steps += 1

    def _inject_nan(self, logits: NDArray[np.float32], rows: Sequence[ForwardRow]) -> None:
        if self._config.nan_on_token is None:
            return
        last = np.cumsum([row.outputs for row in rows])
        for row, end in zip(rows, last, strict=True):
            if (row.history == self._config.nan_on_token).any():
                logits[end - row.outputs : end] = np.nan

    def _pass_time(self, began: float, tokens: int) -> None:
        """Sleep for the rest of the modelled step time; `began` as `time.perf_counter`."""
        modelled_s = self._config.step_ms * 1e-3 + tokens * self._config.token_us * 1e-6
        remaining_s = began + modelled_s - time.perf_counter()
        if remaining_s > 0:
            time.sleep(remaining_s)


class _FlatRows:
    """The rows of one forward as flat arrays."""

    def __init__(self, rows: Sequence[ForwardRow], page_size: int) -> None:
        self._page_size = page_size
        self.tokens: TokenIds = np.concatenate([row.tokens for row in rows])
        self.tables = np.concatenate([row.block_table for row in rows])
        size = len(rows)
        self.starts: Indices = np.fromiter((row.start for row in rows), np.int64, size)
        self.counts: Indices = np.fromiter((len(row.tokens) for row in rows), np.int64, size)
        outputs: Indices = np.fromiter((row.outputs for row in rows), np.int64, size)
        self.states = outputs
        self.sampled: Indices | None = None  # where output positions are among the states; None: they are all
        if any(row.prompt is not None for row in rows):
            self.states = np.fromiter(map(states_of, rows), np.int64, size)
            self.sampled = np.repeat(np.cumsum(self.states) - outputs, outputs) + _ranges(outputs)
        table_sizes = np.fromiter((len(row.block_table) for row in rows), np.int64, size)
        self.table_starts: Indices = np.cumsum(table_sizes) - table_sizes
        self.row_of_token: Indices = np.repeat(np.arange(size), self.counts)
        self.positions: Indices = self.starts[self.row_of_token] + _ranges(self.counts)

    def slots(self, row_numbers: Indices, positions: Indices) -> tuple[NDArray[np.int32], Indices]:
        """Page number and slot within the page of each (row, position)."""
        pages = self.tables[self.table_starts[row_numbers] + positions // self._page_size]
        return pages, positions % self._page_size


def _coefficients(stream: int, length: int) -> Words:
    """One odd pseudo-random factor per position."""
    positions = np.arange(length, dtype=np.uint64) + np.uint64(stream << 40)
    return noise.mix64_array(positions) | np.uint64(1)


@functools.lru_cache(maxsize=4096)
def _origin(salt: bytes) -> int:
    """The state of an empty sequence."""
    return int.from_bytes(hashlib.sha256(salt).digest()[:8], "little")


def _hidden(contents: Words) -> NDArray[np.float32]:
    """Hidden states [positions, HIDDEN_SIZE] from content hashes [positions]."""
    return _uniform(noise.mix64_array(contents), HIDDEN_SIZE)


def _uniform(words: Words, width: int) -> NDArray[np.float32]:
    """fp32 [words, width] in [-4, 4]: hash of (word, column)."""
    hashes = noise.hash_tokens(words[:, None], np.arange(width, dtype=np.int32))
    values = hashes.astype(np.float32)
    values *= np.float32(2.0**-29)
    values -= np.float32(4.0)
    return values


def _ranges(counts: Indices) -> Indices:
    """0 .. count - 1 for each count, concatenated."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _running_sums(terms: Words, counts: Indices) -> Words:
    """Cumulative sums modulo 2^64 over consecutive groups of `counts` terms each."""
    sums = np.cumsum(terms, dtype=np.uint64)
    firsts = np.cumsum(counts) - counts
    offsets: Words = sums[firsts] - terms[firsts]
    return sums - np.repeat(offsets, counts)
