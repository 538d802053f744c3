"""A search through a tree of continuations with one cache, which is truncated to go back.

    python -m executor_service --backend oracle --port 50061 &
    python examples/tree_search.py 127.0.0.1:50061

It finds the likeliest continuation of some length whose tokens are each among the `branches` likeliest:
greedy decoding first, then back to every place where another token could still lead to more. Logprobs are
never above 0, so a branch is left as soon as it is less likely than the best continuation known (branch and
bound). Going back costs nothing: the cache is cut to the length of the place, and another token is fed there.
"""

from __future__ import annotations

import sys

from paceline import ExecutorClient, Session
from paceline.executor.v1 import executor_pb2 as pb

CACHE = 1


class TreeSearch:
    """A depth-first search of one prompt's continuations."""

    def __init__(
        self, executor: ExecutorClient, session: Session, prompt: list[int], depth: int, branches: int
    ) -> None:
        self._executor, self._session = executor, session
        self._prompt, self._depth, self._branches = prompt, depth, branches
        self._cached = 0  # tokens in the cache
        self.best: list[int] = []
        self.logprob = float("-inf")  # of the best continuation
        self.forwards = 0

    def run(self) -> None:
        """Search the whole tree."""
        opening = pb.Opening(
            cache_id=CACHE,
            tokens=self._prompt,
            sampling=pb.Sampling(temperature=0),
            output=pb.OUTPUT_MODE_TOP_K,
            top_k=self._branches,
        )
        self._descend([], 0.0, self._next(self._session.step(openings=[opening])))

    def _descend(self, tokens: list[int], logprob: float, choices: list[tuple[int, float]]) -> None:
        """Try the tokens that may follow `tokens`, likeliest first."""
        for token, added in choices:
            total = logprob + added
            if total <= self.logprob:
                return  # nor can the less likely ones after it
            if len(tokens) + 1 == self._depth:
                self.best, self.logprob = [*tokens, token], total
            else:
                longer = [*tokens, token]
                self._descend(longer, total, self._feed(len(self._prompt) + len(tokens), token))

    def _feed(self, length: int, token: int) -> list[tuple[int, float]]:
        """Cut the cache to `length`, feed `token` there; the tokens that may follow, with their logprobs."""
        ops = []
        if self._cached > length:
            ops.append(pb.Op(truncate=pb.Truncate(cache_id=CACHE, length=length)))
        rows = pb.Rows(
            cache_ids=[CACHE],
            kv_lengths=[length],
            tokens=[token],
            token_counts=[1],
            outputs=[pb.OUTPUT_MODE_TOP_K],
            top_ks=[self._branches],
        )
        return self._next(self._session.step(ops=ops, rows=rows))

    def _next(self, step: pb.Step) -> list[tuple[int, float]]:
        rows = self._executor.unified_decode(step).rows
        if rows.errors:
            raise RuntimeError(rows.errors[0].message)
        self._cached = rows.kv_lengths[0]
        self.forwards += 1
        return list(zip(rows.details[0].top_ids, rows.details[0].top_logprobs, strict=True))


def search(
    executor: ExecutorClient, prompt: list[int], new_tokens: int, branches: int
) -> tuple[list[int], float, int]:
    """(the likeliest continuation, its logprob, number of forwards)."""
    with executor.session(label="example") as session:
        tree = TreeSearch(executor, session, prompt, new_tokens, branches)
        tree.run()
    return tree.best, tree.logprob, tree.forwards


def main() -> None:
    """Compare greedy decoding of one prompt, which is the search with one branch, with a search."""
    with ExecutorClient(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50061") as executor:
        for branches in (1, 3):
            tokens, logprob, forwards = search(executor, [5, 6, 7, 8], new_tokens=6, branches=branches)
            print(f"{branches} branches: {tokens}, logprob {logprob:.3f}, {forwards} forwards")


if __name__ == "__main__":
    main()
