"""E6: whether a token's logits depend on how it was computed: decoded or verified, alone or in a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from executor_service.backends.base import ForwardRow
from executor_service.contract.plan import OutputMode, Sampling
from tests.bench.step_time import rows_of
from tests.gpu.bench import PAGE, Bench, Case
from tests.gpu.random_weights import RandomBackend
from tests.model.driver import Driver, pages_from

_VERIFIED = 5  # tokens of a verify row
_PLAIN = OutputMode.FULL

Logits = NDArray[np.float32]
"""[positions, vocabulary]."""


def run(bench: Bench) -> Iterator[Case]:
    """Cases: what is compared, the largest difference of logits, how often both have the same first token."""
    trials, prompt = bench.pick(12, 2), bench.pick(300, 24)
    companies = bench.pick((1, 7, 31, 127), (1, 3))
    spread = bench.pick(1024, 16)  # tokens of each neighbour
    neighbour_pages = max(companies) * -(-(spread + 1) // PAGE)
    own = (trials + 1) * (prompt + _VERIFIED + 2 * PAGE)
    backend = bench.backend("Qwen3-4B", tokens=neighbour_pages * PAGE + own)
    try:
        pages = pages_from(neighbour_pages + 2)
        pairs: dict[str, list[tuple[Logits, Logits]]] = {}
        rng = np.random.default_rng(5)
        for _ in range(trials):
            driver = Driver(pages, PAGE)
            backend.forward([driver.feed(_tokens(rng, backend, prompt), output=OutputMode.NONE, outputs=0)])
            fed = _tokens(rng, backend, _VERIFIED)
            decoded = np.concatenate([_last(backend, [driver.feed([token], output=_PLAIN)]) for token in fed])
            again = _after(backend, driver, prompt, fed[:1], 0, spread)
            pairs.setdefault("the same decode twice", []).append((decoded[:1], again))
            verified = _after(backend, driver, prompt, fed, 0, spread)
            pairs.setdefault(f"decodes, a verify row of {_VERIFIED}", []).append((decoded, verified))
            for company in companies:
                crowded = _after(backend, driver, prompt, fed[:1], company, spread)
                pairs.setdefault(f"alone, among {company + 1} rows", []).append((decoded[:1], crowded))
        for what, found in pairs.items():
            yield {"compared": what, **_summary(found)}
    finally:
        backend.close()


def _tokens(rng: np.random.Generator, backend: RandomBackend, count: int) -> list[int]:
    return [int(token) for token in rng.integers(0, backend.info.vocab_size, count)]


def _after(
    backend: RandomBackend, driver: Driver, prompt: int, fed: list[int], company: int, spread: int
) -> Logits:
    """Logits of these tokens in one row, fed anew after the prompt, beside so many decodes of others."""
    driver.truncate(prompt)
    others = rows_of(company, 1, spread, Sampling(), backend.info.vocab_size) if company else []
    return _last(backend, [*others, driver.feed(fed, outputs=len(fed), output=_PLAIN)])


def _last(backend: RandomBackend, rows: Sequence[ForwardRow]) -> Logits:
    logits = backend.forward(rows)[-1].logits
    assert logits is not None
    return logits


def _summary(pairs: Sequence[tuple[Logits, Logits]]) -> Case:
    a, b = (np.concatenate(side) for side in zip(*pairs, strict=True))
    top = np.sort(a, axis=-1)
    return {
        "positions": len(a),
        "bitwise_equal": bool(np.array_equal(a, b)),
        "largest_difference": float(np.abs(a - b).max()),
        "same_first_token": float((a.argmax(-1) == b.argmax(-1)).mean()),
        "median_lead_of_first_token": float(np.median(top[:, -1] - top[:, -2])),
    }
