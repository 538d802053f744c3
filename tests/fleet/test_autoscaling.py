"""The number of stacks follows the load, up and down, and no stream ends by the way down."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.fleet.cluster_of_three import NODES, ThreeNodes, three_nodes
from tests.fleet.streams import Streams, streams_at

pytestmark = [pytest.mark.fleet, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
EACH, TOKENS = 16, 400
TARGET = 8  # sequences of a stack: 48 streams want three, and more than there are nodes
LIMIT_S = 600.0  # of machines that stand still for seconds; the figures are printed


async def stacks(cluster: ThreeNodes) -> int:
    """How many serve."""
    found = (await asyncio.to_thread(cluster.status))["stacks"]
    return sum(one["state"] == "serving" for one in found)


async def until(cluster: ThreeNodes, count: int, streams: Streams, each: int) -> float:
    """Hold `each` streams of each way, again and again, until so many stacks serve; the seconds it took."""
    streams.each, began = each, time.monotonic()
    alone = (await streams.run()) if each else []
    while await stacks(cluster) != count:
        assert time.monotonic() - began < LIMIT_S
        assert await streams.run() == alone
    return time.monotonic() - began


async def test_stacks_come_with_the_load_and_go_without_ending_a_stream(tmp_path: Path) -> None:
    with three_nodes(tmp_path) as cluster:
        replicas = {"min": 1, "max": NODES, "target": TARGET}
        cluster.write_spec(executor={"step-ms": 20}, drain_timeout_s=60, replicas=replicas)
        cluster.fleet("up")
        token = (cluster.home / "client-token").read_text().strip()
        [first] = cluster.status()["stacks"]
        async with streams_at(first["address"], token, EACH, TOKENS) as streams:
            up_s = await until(cluster, NODES, streams, EACH)
            down_s = await until(cluster, 1, streams, 1)  # three streams, below 0.7 of one stack's target
            again_s = await until(cluster, NODES, streams, EACH)
            print(
                f"autoscaling: 1 to {NODES} stacks {up_s:.0f} s after the load, back to 1"
                f" {down_s:.0f} s after its end, and up again {again_s:.0f} s"
            )
