"""Says whether tokens are those that the model and the sampling rules give: the kit's one oracle.

The logits come from the executor itself, but by its most innocent path: Forward, which touches no
cache, or (where that is not advertised) a prompt prefilled and fed token by token with FULL output.
So whatever chunking, batching, truncating, forking, verifying or prefix hits do wrong shows up as a
token that those logits do not explain. That Forward and the cached path agree is a check of its own.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import numpy as np
from numpy.typing import NDArray
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import FULL, GREEDY, Executor, Sequence
from tests.conformance.kit.sampler import shortfall

ROUNDING = 1e-3
"""Logit gap below which floating point arithmetic may choose either token."""

_NOISE_ROUNDING = 1e-4  # of fp32 against float64 in penalties, softmax and noise


class Judge:
    """Judges one executor's tokens; `exact` where its arithmetic has no rounding to forgive."""

    def __init__(self, executor: Executor, exact: bool) -> None:
        self.executor = executor
        self.exact = exact

    def check(self, sequence: Sequence, outputs: int | None = None) -> None:
        """Everything that `sequence` emitted, or its last `outputs` tokens, is what follows from its past."""
        tokens = [*sequence.cached, *sequence.pending]
        first = len(tokens) - (len(sequence.emitted) if outputs is None else outputs)
        self.check_tokens(tokens, first, sequence.sampling, sequence.prompt_length)

    def check_tokens(
        self, tokens: Tokens[int], first: int, rules: pb.Sampling = GREEDY, prompt_length: int | None = None
    ) -> None:
        """tokens[first:] were sampled by `rules`, each from what stands before it."""
        assert first < len(tokens), "no token to judge"
        prompt_length = first if prompt_length is None else prompt_length
        logits = self.logits(tokens[:-1], first - 1)
        for position, row in zip(range(first, len(tokens)), logits, strict=True):
            token = tokens[position]
            missing = shortfall(row, tokens[:position], prompt_length, rules)
            best = int(np.argmin(missing))  # the lowest id among equals
            if token == best or missing[token] < self._forgiven(rules):
                continue
            raise AssertionError(
                f"position {position} (output {position - first}) is token {token}, "
                f"which falls {missing[token]:.6g} short of token {best}"
            )

    def check_same(self, one: NDArray[np.float32], other: NDArray[np.float32]) -> None:
        """Two sets of logits for the same tokens agree: bit for bit where arithmetic is exact."""
        assert one.shape == other.shape
        if self.exact:
            assert np.array_equal(one, other), "logits differ"
        else:
            np.testing.assert_allclose(one, other, rtol=ROUNDING, atol=ROUNDING)

    def logits(self, tokens: Tokens[int], first: int) -> NDArray[np.float32]:
        """Raw logits after tokens[first], tokens[first + 1], ...: [len(tokens) - first, vocabulary]."""
        size = len(tokens) * self.executor.vocab * 4
        if self.executor.can("FORWARD") and size <= self.executor.limits.max_full_logits_bytes:
            return forward_logits(self.executor, tokens)[first:]
        session = self.executor.open_session()
        try:
            probe = session.open(tokens[: first + 1], output=FULL)
            rows = [probe.last.logits]
            rows += [probe.feed(tokens=[token], output=FULL).logits for token in tokens[first + 1 :]]
        finally:
            session.close()
        return np.concatenate(rows)

    def _forgiven(self, rules: pb.Sampling) -> float:
        if not self.exact:
            return ROUNDING / min(rules.temperature or 1.0, 1.0)
        plain = rules == GREEDY
        return 0.0 if plain else _NOISE_ROUNDING


def forward_logits(executor: Executor, tokens: Tokens[int]) -> NDArray[np.float32]:
    """The logits of every position of one input, by Forward: [len(tokens), vocabulary]."""
    request = pb.ForwardRequest(inputs=[pb.ForwardInput(tokens=tokens)], outputs=[pb.FORWARD_OUTPUT_LOGITS])
    message = executor.call("Forward", request).results[0].logits
    return np.frombuffer(message.data, dtype="<f4").reshape(tuple(message.shape))
