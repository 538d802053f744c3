"""Parts of a fleet are lost under streams, one by one: none fails, and each part comes back by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet.cluster_of_three import NODES, ThreeNodes, runs, three_nodes
from tests.fleet.streams import Streams, Tokens, streams_at

pytestmark = [pytest.mark.fleet, pytest.mark.filterwarnings("ignore")]
EACH, TOKENS = 16, 400
LIMIT_S = 180.0  # of machines that stand still for seconds; the figures are printed


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeNodes]:
    with three_nodes(tmp_path_factory.mktemp("fleet")) as cluster:
        cluster.write_spec(executor={"step-ms": 20}, drain_timeout_s=20)
        cluster.fleet("up")
        yield cluster


async def serving(cluster: ThreeNodes, without: int = 0) -> dict[str, dict[str, Any]]:
    """The stacks, once three serve whose processes run and are not `without`."""
    began = time.monotonic()
    while True:
        stacks = {one["stack"]: one for one in (await asyncio.to_thread(cluster.status))["stacks"]}
        whole = [one for one in stacks.values() if one["state"] == "serving" and _runs(one, without)]
        if len(whole) == len(stacks) == NODES:
            return stacks
        assert time.monotonic() - began < LIMIT_S, stacks


def _runs(stack: dict[str, Any], without: int) -> bool:
    pids = [stack["pid"], *stack["processes"].values()]
    return len(pids) == 3 and without not in pids and all(map(runs, pids))


async def learned(streams: Streams) -> None:
    while len(streams.client.addresses) < NODES:
        await streams.client.complete(token_ids=[1], max_tokens=1)


async def lose(cluster: ThreeNodes, streams: Streams, alone: list[Tokens], what: str) -> None:
    """Kill one process, or a node, under streams, and wait for another in its place."""
    stacks = await serving(cluster)
    victim = max(stacks.values(), key=lambda one: one["stack"])
    own = {"actor": victim["pid"], "node": victim["pid"], **victim["processes"]}
    pid = own.get(what) or cluster.controller()
    assert pid is not None
    running = asyncio.create_task(streams.run())
    await streams.until_begun(2 * streams.each)
    streams.continued, began = 0, time.monotonic()
    if what == "node":
        await asyncio.to_thread(cluster.kill_node, victim["node"])
    else:
        os.kill(pid, signal.SIGKILL)
    assert await running == alone
    now = await serving(cluster, without=pid)
    print(
        f"{what}: {streams.continued} of {streams.each} streams by Python were continued, three stacks serve"
        f" {time.monotonic() - began:.1f} s after the loss"
    )
    if what in ("actor", "node"):
        assert victim["stack"] not in now
        assert not any(map(runs, victim["processes"].values()))
    elif what == "controller":
        assert {one["pid"] for one in now.values()} == {one["pid"] for one in stacks.values()}
        assert cluster.controller() not in (None, pid)
    else:
        assert now[victim["stack"]]["processes"][what] != victim["processes"][what]
    assert not runs(pid)


async def test_each_part_is_lost_under_streams_none_fails_and_it_comes_back(cluster: ThreeNodes) -> None:
    stacks = await serving(cluster)
    token = (cluster.home / "client-token").read_text().strip()
    given = min(stacks.values(), key=lambda one: one["stack"])["address"]
    async with streams_at(given, token, EACH, TOKENS) as streams:
        await learned(streams)
        alone = await streams.run()
        await streams.until_begun(2 * EACH)
        assert alone[:EACH] == alone[EACH : 2 * EACH] == alone[2 * EACH :]  # by each way
        for what in ("executor", "scheduler", "actor", "controller", "node"):
            await lose(cluster, streams, alone, what)
