"""Beam search: the likeliest of many continuations, whose beginnings share their KV pages.

    python -m executor_service --backend oracle --port 50061 &
    python examples/beam_search.py 127.0.0.1:50061

In each step every beam has one row, which feeds its last token and returns the likeliest next ones. Beams
that continue the same beam are forks of its cache. Forks share all full pages: a new one takes one at most.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from paceline import ExecutorClient
from paceline.executor.v1 import executor_pb2 as pb

GREEDY = pb.Sampling(temperature=0)


@dataclass(frozen=True)
class Beam:
    """A continuation. Its last token is not in its cache yet."""

    cache_id: int
    tokens: tuple[int, ...]  # after the prompt
    logprob: float  # of all of them together


@dataclass(frozen=True)
class Candidate:
    """A beam with one more token."""

    parent: Beam
    token: int
    logprob: float


def candidates(parents: list[Beam], result: pb.StepResult) -> list[Candidate]:
    """The likeliest next tokens of each beam, in the order of the rows."""
    if result.rows.errors:  # for example without free pages: a real program would try fewer beams
        raise RuntimeError(result.rows.errors[0].message)
    details = sorted(result.rows.details, key=lambda detail: detail.row)
    return [
        Candidate(parent, token, parent.logprob + logprob)
        for parent, detail in zip(parents, details, strict=True)
        for token, logprob in zip(detail.top_ids, detail.top_logprobs, strict=True)
    ]


def search(executor: ExecutorClient, prompt: list[int], new_tokens: int, width: int) -> list[Beam]:
    """The `width` likeliest continuations of `new_tokens` ids that are found, likeliest first."""
    with executor.session(label="example") as session:
        root, next_id = Beam(1, (), 0.0), 2
        opening = pb.Opening(
            cache_id=root.cache_id, tokens=prompt, sampling=GREEDY, output=pb.OUTPUT_MODE_TOP_K, top_k=width
        )
        beams = [root]
        result = executor.prefill(session.step(openings=[opening]))
        for length in range(len(prompt), len(prompt) + new_tokens):
            best = sorted(candidates(beams, result), key=lambda one: -one.logprob)[:width]
            ops, taken, kept = [], set[int](), list[Beam]()
            for one in best:
                cache_id = one.parent.cache_id
                if cache_id in taken:  # by a likelier continuation of the same beam
                    fork = pb.Fork(source_id=cache_id, cache_id=next_id, length=length, sampling=GREEDY)
                    ops.append(pb.Op(fork=fork))
                    cache_id, next_id = next_id, next_id + 1
                taken.add(cache_id)
                kept.append(Beam(cache_id, (*one.parent.tokens, one.token), one.logprob))
            given_up = [beam.cache_id for beam in beams if beam.cache_id not in taken]
            if given_up:
                ops.append(pb.Op(release=pb.Release(cache_ids=given_up)))
            beams = kept
            if length + 1 < len(prompt) + new_tokens:
                rows = pb.Rows(
                    cache_ids=[beam.cache_id for beam in beams],
                    kv_lengths=[length] * len(beams),
                    tokens=[beam.tokens[-1] for beam in beams],
                    token_counts=[1] * len(beams),
                    outputs=[pb.OUTPUT_MODE_TOP_K] * len(beams),
                    top_ks=[width] * len(beams),
                )
                result = executor.unified_decode(session.step(ops=ops, rows=rows))
    return beams


def main() -> None:
    """Print the four likeliest continuations of one prompt."""
    with ExecutorClient(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50061") as executor:
        for beam in search(executor, [5, 6, 7, 8], new_tokens=8, width=4):
            print(f"{beam.logprob:8.3f}", list(beam.tokens))


if __name__ == "__main__":
    main()
