"""A scheduler of your own: many prompts share each step of one executor.

    python -m executor_service --backend oracle --port 50061 &
    python examples/own_scheduler.py 127.0.0.1:50061

Minimal continuous batching: a prompt's cache is opened as soon as the step's limits allow, every running
sequence has one decode row in each step, and caches of ended sequences are released by the next step.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field

from paceline import ExecutorClient
from paceline.executor.v1 import executor_pb2 as pb


@dataclass
class BatchedPrompt:
    """One prompt: its cache in the executor, and the tokens sampled so far."""

    prompt: list[int]
    cache_id: int = 0  # 0: not opened yet
    kv_length: int = 0  # tokens whose keys and values the executor holds
    output: list[int] = field(default_factory=list)


def generate(executor: ExecutorClient, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy continuations of all prompts, `new_tokens` ids each, in the order of the prompts."""
    limits = executor.get_info().limits
    sequences = [BatchedPrompt(prompt) for prompt in prompts]
    queued, running, ended = deque(sequences), list[BatchedPrompt](), list[int]()
    cache_ids = iter(range(1, len(prompts) + 1))  # never reused within a session
    with executor.session(label="example") as session:
        while queued or running or ended:
            budget = limits.max_step_tokens - len(running)  # each decode row feeds one token
            openings: list[BatchedPrompt] = []
            max_openings = limits.max_rows - len(running)
            while queued and len(openings) < max_openings and len(queued[0].prompt) <= budget:
                sequence = queued.popleft()
                sequence.cache_id = next(cache_ids)
                budget -= len(sequence.prompt)
                openings.append(sequence)
            step = session.step(
                ops=[pb.Op(release=pb.Release(cache_ids=ended))] if ended else [],
                rows=pb.Rows(
                    cache_ids=[one.cache_id for one in running],
                    kv_lengths=[one.kv_length for one in running],
                ),
                openings=[
                    pb.Opening(cache_id=one.cache_id, tokens=one.prompt, sampling=pb.Sampling(temperature=0))
                    for one in openings
                ],
            )
            rows = executor.unified_decode(step).rows
            if rows.errors:  # rows are refused one by one; a real scheduler waits for free pages, or preempts
                raise RuntimeError(rows.errors[0].message)
            running += openings  # the results of rows come first, then those of openings
            tokens = iter(rows.tokens)
            for sequence, kv_length, count in zip(running, rows.kv_lengths, rows.token_counts, strict=True):
                sequence.kv_length = kv_length
                sequence.output += [next(tokens) for _ in range(count)]
            ended = [one.cache_id for one in running if len(one.output) >= new_tokens]
            running = [one for one in running if len(one.output) < new_tokens]
    return [one.output for one in sequences]


def main() -> None:
    """Continue twelve prompts of four ids each, and print the outputs."""
    with ExecutorClient(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50061") as executor:
        prompts = [[i, i + 1, i + 2, i + 3] for i in range(12)]
        for prompt, output in zip(prompts, generate(executor, prompts, 16), strict=True):
            print(prompt, "->", output)


if __name__ == "__main__":
    main()
