"""A fleet on three nodes of Ray: streams survive the loss of a node, and a new stack takes its place."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paceline
import pytest
from paceline.channel import Security

from tests.fleet.cluster_of_three import NODES, runs, three_nodes

pytestmark = [pytest.mark.fleet, pytest.mark.filterwarnings("ignore")]
STREAMS, TOKENS = 12, 600
LIMIT_S = 90.0  # of machines that stand still for seconds; the figures are printed


def test_a_node_is_lost_under_streams_none_fails_and_a_new_stack_serves(tmp_path: Path) -> None:
    with three_nodes(tmp_path) as cluster:
        cluster.write_spec(executor={"step-ms": 20})
        assert "+ oracle: 3 stacks of oracle" in cluster.fleet("up", "--plan")
        assert not cluster.home.exists()
        began = time.monotonic()
        cluster.fleet("up")
        print(f"three stacks serve after {time.monotonic() - began:.1f} s")
        assert cluster.fleet("up", "--plan") == "nothing changes\n"
        stacks = cluster.status()["stacks"]
        assert len({one["address"] for one in stacks}) == len({one["node"] for one in stacks}) == NODES
        assert _open_ports() == set()  # beyond loopback nothing of it listens

        token = (cluster.home / "client-token").read_text().strip()
        with (
            paceline.Client(given := stacks[0]["address"], security=Security(token=token)) as client,
            ThreadPoolExecutor(STREAMS) as threads,
        ):
            while len(client.addresses) < NODES:  # it learns of the others from the one
                client.complete(token_ids=[1], max_tokens=1)

            def stream(number: int) -> tuple[tuple[int, ...], int]:
                one = client.generate(
                    token_ids=[1, 2, number], max_tokens=TOKENS, seed=7, affinity_key=str(number)
                )
                return one.collect()[0].token_ids, one.resumptions

            undisturbed = [tokens for tokens, _ in threads.map(stream, range(STREAMS))]
            running = [threads.submit(stream, number) for number in range(STREAMS)]
            victim = max(cluster.status()["stacks"], key=lambda one: one["running"])
            began = time.monotonic()
            cluster.kill_node(victim["node"])
            outcomes = [one.result() for one in running]
            assert [tokens for tokens, _ in outcomes] == undisturbed
            print(
                f"{sum(resumptions > 0 for _, resumptions in outcomes)} of {STREAMS} streams were continued"
            )
            while len(serving := _serving(cluster.status(), without=victim["stack"])) < NODES:
                assert time.monotonic() - began < LIMIT_S, cluster.status()
            print(f"three stacks serve {time.monotonic() - began:.1f} s after the loss")
            while {*client.addresses, given} != {
                *serving,
                given,
            }:  # the given one is kept, even if it is lost
                client.complete(token_ids=[1], max_tokens=1)
                assert time.monotonic() - began < LIMIT_S, (client.addresses, serving)
        assert not [pid for pid in victim["processes"].values() if runs(pid)]
        left = [pid for one in cluster.status()["stacks"] for pid in one["processes"].values()]
        cluster.fleet("down")
        assert not [pid for pid in left if runs(pid)]


def _serving(status: dict[str, list[dict[str, str]]], without: str) -> set[str]:
    return {
        one["address"] for one in status["stacks"] if one["state"] == "serving" and one["stack"] != without
    }


def _open_ports() -> set[str]:
    """Addresses beyond loopback on which processes of this test's Ray and stacks listen."""
    lines = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    ours = ("ray", "gcs_server", "python", "paceline")
    found = {line.split()[3] for line in lines if any(f'("{name}' in line for name in ours)}
    return {one for one in found if "127.0.0.1" not in one and not one.startswith("[::1]")}
