"""Models of every architecture equal transformers': logits to 1e-4 in fp32, and greedy tokens.

In one piece, in chunks, in a batch, after a truncation and a fork, with drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from executor_service.backends.base import Backend
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.ops.kernels import PlainKernels
from executor_service.contract.plan import OutputMode
from tests.model.architectures import ARCHITECTURES, CASES, FAST_CASES, VARIANTS, save_variant
from tests.model.driver import Driver, logits_of, pages_from
from tests.support.untyped import present

PAGE, PAGES = 16, 40
TOKENS = np.random.default_rng(3).integers(3, 211, 90).tolist()
Expected = Callable[[list[int]], np.ndarray]


def loaded(path: Path) -> TorchBackend:
    backend = TorchBackend(TorchConfig(path, threads=1))
    backend.load(lambda what, done: None)
    backend.allocate(PAGES, PAGE)
    return backend


def expected_of(model: PreTrainedModel) -> Expected:
    def logits(tokens: list[int]) -> np.ndarray:
        with torch.inference_mode():
            found: np.ndarray = model(torch.tensor([tokens])).logits[0].numpy()
            return found

    return logits


def logits(backend: Backend, driver: Driver, tokens: list[int]) -> np.ndarray:
    return logits_of(backend.forward([driver.feed(tokens, outputs=len(tokens))])[0])


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < 1e-4


def check_pieces(backend: Backend, expected: Expected) -> None:
    """One piece, and chunks."""
    whole = expected(TOKENS[:67])
    assert np.abs(whole).max() > 0.5  # flat logits would prove nothing
    pages = pages_from(1)
    assert_close(logits(backend, Driver(pages, PAGE), TOKENS[:67]), whole)
    driver, parts, first = Driver(pages, PAGE), [], 0
    for count in (7, 33, 1, 26):
        parts.append(logits(backend, driver, TOKENS[first : first + count]))
        first += count
    assert_close(np.concatenate(parts), whole)


def check_batch(backend: Backend, expected: Expected) -> None:
    """A decode, a verification and a prompt side by side; a truncation; a fork."""
    pages = pages_from(1)
    drivers = [Driver(pages, PAGE) for _ in range(3)]
    texts, fed, asked = [TOKENS[i : i + 45] for i in (0, 3, 40)], [30, 17, 0], [1, 6, 40]
    backend.forward([drivers[i].feed(texts[i][: fed[i]]) for i in (0, 1)])
    rows = [
        driver.feed(text[n : n + q], outputs=q)
        for driver, text, n, q in zip(drivers, texts, fed, asked, strict=True)
    ]
    for out, text, n, q in zip(backend.forward(rows), texts, fed, asked, strict=True):
        assert_close(logits_of(out), expected(text[: n + q])[n:])
    drivers[2].truncate(19)
    fork = drivers[2].fork(backend, 18)
    rows = [drivers[2].feed(TOKENS[70:75], outputs=5), fork.feed(TOKENS[80:84], outputs=4)]
    outs = backend.forward(rows)
    assert_close(logits_of(outs[0]), expected(texts[2][:19] + TOKENS[70:75])[19:])
    assert_close(logits_of(outs[1]), expected(texts[2][:18] + TOKENS[80:84])[18:])


def greedy_tokens(backend: Backend, prompt: list[int], steps: list[int]) -> list[int]:
    """Tokens of one sequence: each step verifies so many drafts, of which the first is right, or none is."""
    driver, known = Driver(pages_from(1), PAGE), list(prompt)
    fed = prompt
    for drafts in steps:
        tokens = [*fed, *([7] * drafts)]
        [out] = backend.forward([driver.feed(tokens, drafts + 1, OutputMode.SAMPLE)])
        token = int(present(out.tokens)[0])
        driver.truncate(len(known))
        known.append(token)
        fed = [token]
    return known[len(prompt) :]


def check_tokens(backend: Backend, expected: Expected) -> None:
    """Greedy tokens, some of them with drafts that are thrown away, and with drafts that are right."""
    known = TOKENS[:30]
    for _ in range(9):
        known = [*known, int(expected(known)[-1].argmax())]
    assert greedy_tokens(backend, TOKENS[:30], [0, 3, 0, 2, 5, 0, 1, 0, 4]) == known[30:]
    driver = Driver(pages_from(1), PAGE)
    backend.forward([driver.feed(TOKENS[:29])])
    [out] = backend.forward([driver.feed(known[29:38], 9, OutputMode.SAMPLE)])
    assert present(out.tokens).tolist() == known[30:]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_there_are_at_least_eight_models_of_each_architecture(architecture: str) -> None:
    assert len(VARIANTS[architecture]) >= 8


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [pytest.param(*case, marks=[] if case in FAST_CASES else pytest.mark.slow) for case in CASES],
)
def test_a_model_equals_transformers(
    architecture: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = expected_of(save_variant(architecture, variant, tmp_path))
    backend = loaded(tmp_path)
    check_pieces(backend, expected)
    check_batch(backend, expected)
    check_tokens(backend, expected)
    backend.close()
    monkeypatch.setattr(
        TorchBackend, "_kernels", lambda self: PlainKernels(torch.device("cpu"), torch.float32)
    )
    check_pieces(loaded(tmp_path), expected)
