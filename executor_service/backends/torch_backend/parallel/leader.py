"""`LeaderBackend`: rank 0's `Backend`. It sends each call to the other ranks, and makes it with them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from executor_service.adapters.weights import AdapterTarget, AdapterWeights, LinearKey
from executor_service.backends.base import (
    ForwardOutput,
    ForwardRow,
    ModelDescription,
    PendingForward,
    Progress,
    RowOutput,
    Synchronous,
    TokenizerBundle,
)
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.resident import resident_bytes
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from executor_service.backends.torch_backend.parallel.adapter_buffer import SLOT, buffer_bytes, pack_weights
from executor_service.backends.torch_backend.parallel.cut import Cut
from executor_service.backends.torch_backend.parallel.followers import Followers
from executor_service.backends.torch_backend.parallel.group import Group
from executor_service.backends.torch_backend.parallel.plan_buffer import (
    Body,
    CollectiveCall,
    pack_inputs,
)
from executor_service.backends.torch_backend.parallel.ranks import Rank
from executor_service.backends.torch_backend.parallel.tensor_shard import TensorShard
from executor_service.contract.forward_view import WHOLE, ForwardView
from executor_service.contract.plan import TokenIds

_NOTHING = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class LeaderAdapter:
    """An adapter on rank 0."""

    own: Any  # this rank's part
    buffer: Body  # all of it


class LeaderBackend(Synchronous):
    """Implements `Backend`. A failed call ends all ranks, since their states may then differ."""

    info: ModelDescription

    def __init__(
        self,
        config: TorchConfig,
        rank: Rank,
        timeout_s: float,
        followers: Followers,
        listener: socket.socket | None = None,
    ) -> None:
        """`listener`: socket at which the followers connect; None where a launcher started all ranks."""
        self._config, self._rank, self._timeout_s = config, rank, timeout_s
        self._followers, self._listener = followers, listener
        self._group: Group
        self._backend: TorchBackend
        self.max_piece_tokens = config.max_piece_tokens

    def load(self, progress: Progress) -> None:
        """Check that the model can be split, wait for the other ranks, load. Raises ModelError."""
        with self._all_or_none():
            checkpoint = open_checkpoint(self._config.model)
            checkpoint.close()
            Cut(checkpoint.spec, self._rank.number, self._rank.ranks)
            progress("waiting for the other ranks", 0.0)
            self._group = Group(
                self._rank, torch.device(self._config.device), self._timeout_s, self._listener
            )
            self._backend = TorchBackend(self._config, TensorShard(self._group), self._tell)
            self._backend.load(progress)
        self.info = replace(self._backend.info, ranks=self._rank.ranks, can_mask_forward=False)
        own = self.info.adapters
        if own is not None:

            def held(rank: int, changed: Iterable[LinearKey], stored: int) -> int:
                keys = list(changed)
                return own.held_bytes(rank, keys, stored) + buffer_bytes(keys, stored)

            self.info = replace(self.info, adapters=AdapterTarget(own.linears, held))

    def tokenizer(self) -> TokenizerBundle:
        return self._backend.tokenizer()

    def offer_adapters(self, slots: int, max_bytes: int) -> None:
        """The same slots on every rank. Rank 0 alone decides how much memory is left to KV pages."""
        with self._all_or_none():
            self._group.send_plan(CollectiveCall.OFFER_ADAPTERS, np.array([slots], np.int32))
            self._backend.offer_adapters(slots, max_bytes)

    def default_pages(self, page_size: int, rows: int, tokens: int) -> int:
        """All ranks compute the largest step together; the result is rank 0's."""
        with self._all_or_none():
            self._group.send_plan(CollectiveCall.DEFAULT_PAGES, np.array([page_size, rows, tokens], np.int32))
            return self._backend.default_pages(page_size, rows, tokens)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page on one rank."""
        return self._backend.page_bytes(page_size)

    def allocate(self, pages: int, page_size: int) -> None:
        """Allocate the same pages on every rank, each for its own heads."""
        with self._all_or_none():
            self._group.send_plan(CollectiveCall.ALLOCATE, np.array([pages, page_size], np.int32))
            self._backend.allocate(pages, page_size)
        self.max_pending_forwards = self._backend.max_pending_forwards

    def capture(self, rows: int, tokens: int, progress: Progress) -> None:
        """Capture the same steps on every rank, which rank 0's runner tells the others."""
        with self._all_or_none():
            self._backend.capture(rows, tokens, progress)

    def launch(self, rows: ForwardRows) -> PendingForward:
        """Start one forward on every rank, which rank 0's runner tells the others."""
        with self._all_or_none():
            return self._backend.launch(rows)

    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        with self._all_or_none():
            return self._backend.forward(rows)

    def copy_page(self, source: int, target: int) -> None:
        with self._all_or_none():
            self._group.send_plan(CollectiveCall.COPY_PAGE, np.array([source, target], np.int32))
            self._backend.copy_page(source, target)

    def prepare_adapter(self, weights: AdapterWeights) -> LeaderAdapter:
        """This rank's part, and a buffer for the others, which is kept for the next time."""
        return LeaderAdapter(self._backend.prepare_adapter(weights), pack_weights(weights))

    def load_adapter(self, slot: int, prepared: LeaderAdapter) -> None:
        """Send an adapter to the other ranks, each of which packs its part."""
        with self._all_or_none():
            prepared.buffer[SLOT] = slot
            self._group.send_plan(CollectiveCall.LOAD_ADAPTER, prepared.buffer)
            self._backend.load_adapter(slot, prepared.own)

    def unload_adapter(self, slot: int) -> None:
        with self._all_or_none():
            self._group.send_plan(CollectiveCall.UNLOAD_ADAPTER, np.array([slot], np.int32))
            self._backend.unload_adapter(slot)

    def forward_once(
        self, inputs: Sequence[TokenIds], want: frozenset[str], view: ForwardView = WHOLE
    ) -> list[ForwardOutput]:
        """As `Backend.forward_once`, without positions and masks."""
        assert view.is_plain
        with self._all_or_none():
            self._group.send_plan(CollectiveCall.FORWARD_ONCE, pack_inputs(inputs, want, view))
            return self._backend.forward_once(inputs, want, view)

    def memory_bytes(self) -> dict[str, int]:
        """Sizes on rank 0."""
        return self._backend.memory_bytes()

    def live_bytes(self) -> dict[str, int]:
        """Those of rank 0; and the resident memory of the other ranks that it started."""
        return {**self._backend.live_bytes(), "ranks": sum(map(resident_bytes, self._followers.pids))}

    def close(self) -> None:
        """Close the followers, then this rank."""
        with suppress(RuntimeError):  # a follower may have ended already
            self._group.send_plan(CollectiveCall.CLOSE, _NOTHING)
        self._followers.close()
        self._backend.close()
        self._group.close()

    def _tell(self, pack: Callable[[], Body]) -> None:
        self._group.send_plan(CollectiveCall.REPEAT, pack())

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Kill the followers if a call fails; none is expected to connect any more."""
        try:
            with self._followers.working():
                yield
        except BaseException:
            self._followers.kill()
            if self._listener is not None:
                self._listener.close()  # unless the group has taken it
            raise
