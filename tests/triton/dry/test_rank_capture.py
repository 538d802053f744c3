"""What one of several ranks captures, over a group that exchanges nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor_service.backends.torch_backend.ops.row_tensors import LOGITS_ROWS
from executor_service.backends.torch_backend.parallel.group import Group
from executor_service.backends.torch_backend.parallel.tensor_shard import TensorShard
from tests.triton.dry.fake_device import fake_device, fake_runner, watched
from tests.triton.dry.test_capture import BF16, buffered, shapes

LAYERS = 2


class FakeGroup(Group):
    """A rank of a group in which the others are missing, and nothing waits for them."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.timeout_s = rank, ranks, 60.0
        self._steps = dist.new_group(backend="fake")


@contextmanager
def fake_group(rank: int, ranks: int) -> Iterator[FakeGroup]:
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield FakeGroup(rank, ranks)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("name", "ranks"), [("Qwen3-8B", 2), ("Qwen3-8B", 8), ("Qwen3-30B-A3B", 4)])
def test_a_rank_captures_two_sums_a_layer_and_nothing_that_needs_the_host(
    name: str, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last rank; in about the memory that one process needs, which has all logits, but no ranks' sums."""
    with fake_device(), fake_group(ranks - 1, ranks) as group:
        model, runner = fake_runner(name, BF16, None, layers=LAYERS, pages=100, shard=TensorShard(group))
        _, alone = fake_runner(name, BF16, None, layers=LAYERS, pages=100)
        assert model.capturable
        for shape in shapes(model, runner._tiling)[::9]:
            watch = watched(buffered(runner, shape))
            slices = -(-shape.outputs // LOGITS_ROWS)
            collectives = {name: n for name, n in watch.operations.items() if name.startswith("c10d")}
            assert collectives == {"c10d._allgather_base_.default": 1 + 2 * LAYERS + slices}
        peaks = [watched(buffered(r, shape)).peak_bytes for r in (alone, runner)]
    with capsys.disabled():
        sizes = f"{shape.tokens} tokens and {shape.outputs} outputs"
        print(
            f"\n{name}, MB at once, {sizes}: {peaks[0] / 1e6:.0f} alone, {peaks[1] / 1e6:.0f} on 1 of {ranks}"
        )
    assert peaks[1] <= 1.15 * peaks[0]
