"""The head of a fleet is lost: streams go on, and once it is back, the stacks are the same ones."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.cluster_of_three import ThreeNodes, three_nodes
from tests.fleet.streams import streams_at
from tests.fleet.test_losses import TOKENS, learned, serving

pytestmark = [pytest.mark.fleet, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ThreeNodes]:
    with three_nodes(tmp_path) as cluster:
        cluster.write_spec(executor={"step-ms": 20}, drain_timeout_s=20)
        cluster.fleet("up")
        yield cluster


@pytest.mark.parametrize("gone_s", [90.0, pytest.param(300.0, marks=pytest.mark.slow)])
async def test_the_head_is_lost_for_a_while_and_its_stacks_are_the_same_ones_afterwards(
    cluster: ThreeNodes, gone_s: float
) -> None:
    before = await serving(cluster)
    token = (cluster.home / "client-token").read_text().strip()
    first, *_, victim = sorted(before.values(), key=lambda one: one["stack"])
    async with streams_at(first["address"], token, 8, TOKENS) as streams:
        await learned(streams)
        alone = await streams.run()
        began, rounds = time.monotonic(), 0
        port = await asyncio.to_thread(cluster.kill_head)
        os.kill(victim["processes"]["scheduler"], signal.SIGKILL)
        while time.monotonic() - began < gone_s:
            assert await streams.run() == alone
            rounds += 1
        async with streams_at(victim["address"], token, 1, TOKENS) as there:
            assert await there.run() == [alone[0], alone[8], alone[16]]  # its supervisor has brought it back
        began = time.monotonic()
        cluster.start_head(port)  # in this thread, as Ray sets handlers of signals
        assert await streams.run() == alone
        after = await serving(cluster, without=victim["processes"]["scheduler"])
        print(
            f"head: {24 * rounds} streams while it was gone for {gone_s:.0f} s;"
            f" all is known {time.monotonic() - began:.1f} s after its return"
        )

    def fixed(stacks: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
        return {
            name: (one["pid"], one["address"], one["processes"]["executor"]) for name, one in stacks.items()
        }

    assert fixed(after) == fixed(before)
