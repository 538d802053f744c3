"""`Group`: the collectives of a tensor-parallel group, over torch.distributed.

There are three process groups, with different timeouts. The default group is for joining and loading. The
second carries plans, over gloo from host memory; followers wait in it for as long as rank 0 has no step. The
third is for the collectives within a step, where a rank that keeps another waiting for longer than
`timeout_s` counts as lost. A rank that ends closes its connections, which gloo reports at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from executor_service.backends.torch_backend.parallel.ranks import LOOPBACK, Rank

_LOAD = timedelta(hours=1)
_IDLE = timedelta(days=3650)
_REPORT_BYTES = 1024
_FRAME = 8192
"""Numbers of a plan's first broadcast, 32 KiB: those of a step of 64 decodes on 1,024 tokens each."""
_HEAD = 2  # numbers: the plan's kind, and the length of its body

# Its name until torch 2.12.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Group:
    """This process's membership among the ranks. One thread makes all calls; failures raise RuntimeError."""

    def __init__(
        self, rank: Rank, device: torch.device, timeout_s: float, listener: socket.socket | None = None
    ) -> None:
        """Wait for all ranks. `listener`: rank 0's socket, where no launcher (torchrun) started the ranks."""
        self.rank, self.ranks, self.timeout_s = rank.number, rank.ranks, timeout_s
        if rank.host == LOOPBACK:  # all ranks are on this machine: refuse connections from others
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo", store=_store(rank, listener), rank=rank.number, world_size=rank.ranks, timeout=_LOAD
        )
        step = timedelta(seconds=timeout_s)
        # Gloo sends when the receiver is ready, so rank 0 waits too, for a follower that does not receive.
        self._plans = dist.new_group(backend="gloo", timeout=_IDLE if rank.number else step)
        self._steps = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=step)
        self._frame = torch.zeros(_FRAME, dtype=torch.int32)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x, [ranks, *x.shape], on every rank; x has at least one dimension."""
        parts = torch.empty(self.ranks, *x.shape, dtype=x.dtype, device=x.device)
        _all_gather(parts.flatten(0, 1), x.contiguous(), group=self._steps)
        return parts

    def gather_on_leader(self, x: torch.Tensor) -> torch.Tensor | None:
        """Every rank's x, [ranks, *x.shape], on rank 0; None elsewhere."""
        if self.rank > 0:
            dist.gather(x.contiguous(), dst=0, group=self._steps)
            return None
        parts = torch.empty(self.ranks, *x.shape, dtype=x.dtype, device=x.device)
        dist.gather(x.contiguous(), list(parts), dst=0, group=self._steps)
        return parts

    def share(self, x: torch.Tensor) -> None:
        """Copy rank 0's x to every other rank's, in place."""
        dist.broadcast(x, 0, group=self._steps)

    def send_plan(self, kind: int, body: NDArray[np.int32]) -> None:
        """Send a plan from rank 0 to all others: in one broadcast, or in two if it is longer than a frame."""
        numbers = self._frame.numpy()
        first = body[: _FRAME - _HEAD]
        numbers[:_HEAD] = kind, len(body)
        numbers[_HEAD : _HEAD + len(first)] = first
        dist.broadcast(self._frame, 0, group=self._plans)
        if len(first) < len(body):
            dist.broadcast(torch.from_numpy(body[len(first) :]), 0, group=self._plans)

    def receive_plan(self) -> tuple[int, NDArray[np.int32]]:
        """On other ranks: the kind and the body of rank 0's next plan; waits for it without a limit."""
        dist.broadcast(self._frame, 0, group=self._plans)
        kind, size = self._frame[:_HEAD].tolist()
        body = np.empty(size, np.int32)
        first = min(size, _FRAME - _HEAD)
        body[:first] = self._frame[_HEAD : _HEAD + first].numpy()
        if first < size:
            dist.broadcast(torch.from_numpy(body[first:]), 0, group=self._plans)
        return kind, body

    def exchange(self, report: str) -> list[str]:
        """All ranks' reports in the order of ranks, once all have reported; at most _REPORT_BYTES of each."""
        mine = torch.zeros(_REPORT_BYTES, dtype=torch.uint8)
        text = report.encode()[:_REPORT_BYTES]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
        reports = torch.empty(self.ranks, _REPORT_BYTES, dtype=torch.uint8)
        dist.all_gather(list(reports), mine)
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in reports]

    def close(self) -> None:
        """Leave the group. All ranks have to."""
        dist.destroy_process_group()


def _store(rank: Rank, listener: socket.socket | None) -> Store:
    if listener is None:
        store: Store = next(rendezvous("env://", rank.number, rank.ranks, timeout=_LOAD))[0]
        return store
    return TCPStore(
        rank.host,
        rank.port,
        rank.ranks,
        is_master=True,
        timeout=_LOAD,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
