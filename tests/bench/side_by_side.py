"""Decode speed through the public Generate RPC beside peers, in alternating pairs of one run.

usage: python -m tests.bench.side_by_side ADDRESS --peer NAME='COMMAND' [--streams 1,8,32] [--pairs 5]

ADDRESS is a running scheduler (`paceline serve`). COMMAND is run with `--rows N` appended, once per
pair, and prints a JSON line with `decode_tok_s` for those rows; give several peers or none.
Prompts of 64 random tokens, 64 new ones, speculation off. Ratios are of each pair, so a drifting
machine cancels.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import subprocess

from paceline.scheduler.v1 import scheduler_pb2 as pb

from tests.bench.load import decode_tok_s, first_token_ms, run_streams

GREEDY = pb.SamplingParams(temperature=0.0)
NUCLEUS = pb.SamplingParams(temperature=0.8, top_p=0.95, seed=7)


def peer_tok_s(command: str, rows: int) -> float:
    out = subprocess.run(
        [*shlex.split(command), "--rows", str(rows)], check=True, capture_output=True, text=True
    )
    return float(json.loads(out.stdout.strip().splitlines()[-1])["decode_tok_s"])


def spread(values: list[float]) -> dict[str, float]:
    return {
        "min": round(min(values), 3),
        "median": round(statistics.median(values), 3),
        "max": round(max(values), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    args = parser.parse_args()
    peers = dict(peer.split("=", 1) for peer in args.peer)
    for streams in map(int, args.streams.split(",")):

        def ours(sampling: pb.SamplingParams, seed: int, streams: int = streams) -> tuple[float, float]:
            done = asyncio.run(run_streams(args.address, streams, args.prompt, args.new, sampling, seed))
            return decode_tok_s(done), first_token_ms(done)

        ours(GREEDY, 1000)  # warm
        greedy, nucleus, first = [], [], []
        theirs: dict[str, list[float]] = {name: [] for name in peers}
        for pair in range(args.pairs):
            speed, wait = ours(GREEDY, pair)
            greedy.append(speed)
            first.append(wait)
            for name, command in peers.items():
                theirs[name].append(peer_tok_s(command, streams))
            nucleus.append(ours(NUCLEUS, pair)[0])
        row: dict[str, object] = {
            "streams": streams,
            "pairs": args.pairs,
            "greedy_tok_s": spread(greedy),
            "first_token_ms": spread(first),
            "nucleus_tok_s": spread(nucleus),
            "nucleus_to_greedy": spread([b / a for a, b in zip(greedy, nucleus, strict=True)]),
        }
        for name, speeds in theirs.items():
            row[f"{name}_tok_s"] = spread(speeds)
            row[f"greedy_to_{name}"] = spread([a / b for a, b in zip(greedy, speeds, strict=True)])
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
