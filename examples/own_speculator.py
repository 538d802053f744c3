"""A drafter of your own: draft the next tokens, and let the executor verify all of them in one forward.

    python -m executor_service --backend script --script examples/own_speculator.jsonl --port 50062 &
    python examples/own_speculator.py 127.0.0.1:50062

The executor says what a file tells it: a text that repeats itself, of which each byte is a token. The drafts
are the tokens that followed an earlier occurrence of the last two tokens. The executor accepts those that
equal the tokens it would have sampled, so the output is the same as without drafts; a rejected draft only
adds to the computation of its forward.
"""

from __future__ import annotations

import sys

from paceline import ExecutorClient
from paceline.executor.v1 import executor_pb2 as pb

PROMPT = b"Who leads?"


def draft(tokens: list[int], count: int) -> list[int]:
    """Up to `count` tokens that followed the last earlier occurrence of the last two tokens."""
    pair = tokens[-2:]
    for at in range(len(tokens) - 3, -1, -1):
        if tokens[at : at + 2] == pair:
            return tokens[at + 2 : at + 2 + count]
    return []


def generate(executor: ExecutorClient, prompt: list[int], new_tokens: int) -> tuple[list[int], int]:
    """(greedy continuation of `new_tokens` ids, number of forwards)."""
    cache_id, tokens = 1, list(prompt)
    sampling = pb.Sampling(temperature=0)
    with executor.session(label="example") as session:
        opening = pb.Opening(cache_id=cache_id, tokens=prompt, sampling=sampling)
        rows = executor.prefill(session.step(openings=[opening])).rows
        tokens += rows.tokens
        forwards = 1
        while (missing := len(prompt) + new_tokens - len(tokens)) > 0:
            drafts = draft(tokens, min(8, missing - 1))
            row = pb.Rows(
                cache_ids=[cache_id],
                kv_lengths=[rows.kv_lengths[0]],
                drafts=drafts,
                draft_counts=[len(drafts)],
            )
            rows = executor.unified_decode(session.step(rows=row)).rows
            if rows.errors:
                raise RuntimeError(rows.errors[0].message)
            tokens += rows.tokens  # the accepted drafts, and the token sampled after them
            forwards += 1
    return tokens[len(prompt) :], forwards


def main() -> None:
    """Continue one prompt, and print the number of forwards."""
    with ExecutorClient(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50062") as executor:
        output, forwards = generate(executor, list(PROMPT), 100)
        print(bytes(output).decode())
        print(f"{len(output)} tokens in {forwards} forwards")


if __name__ == "__main__":
    main()
