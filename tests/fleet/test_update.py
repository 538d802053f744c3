"""A fleet is updated under streams: none fails, none mixes two models, and what can't serve is undone."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.fleet.cluster_of_three import three_nodes
from tests.fleet.streams import Tokens, streams_at

pytestmark = [pytest.mark.fleet, pytest.mark.filterwarnings("ignore")]
EACH, TOKENS = 11, 200
WORDS = {"replicas": 2, "drain_timeout_s": 60}


async def test_an_update_under_33_streams_fails_none_and_mixes_none_and_a_bad_one_is_undone(
    tmp_path: Path,
) -> None:
    with three_nodes(tmp_path) as cluster:
        cluster.write_spec(executor={"step-ms": 20}, **WORDS)
        cluster.fleet("up")
        token = (cluster.home / "client-token").read_text().strip()
        before = cluster.status()["stacks"]
        async with streams_at(before[0]["address"], token, EACH, TOKENS) as streams:
            old = await streams.run()
            cluster.write_spec(executor={"step-ms": 20, "vocab-size": 300}, **WORDS)
            began, rounds = time.monotonic(), list[list[Tokens]]()
            update = asyncio.create_task(asyncio.to_thread(cluster.fleet, "update"))
            while not update.done():
                rounds.append(await streams.run())
            await update
            new = await streams.run()
            print(f"update: {len(rounds)} rounds of {3 * EACH} streams in {time.monotonic() - began:.1f} s")
            assert all(one != other for one, other in zip(old, new, strict=True))
            for found in rounds:
                assert all(one in pair for one, *pair in zip(found, old, new, strict=True))
            pids = {one["pid"] for one in cluster.status()["stacks"]}
            assert pids.isdisjoint(one["pid"] for one in before)

            cluster.write_spec(backend="torch", model=str(tmp_path / "none.gguf"), **WORDS)
            with pytest.raises(AssertionError, match="what was there before serves again"):
                await asyncio.to_thread(cluster.fleet, "update")
            assert {one["pid"] for one in cluster.status()["stacks"]} == pids
            assert await streams.run() == new
