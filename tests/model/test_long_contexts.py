"""Beyond the length that a model was trained for, logits and tokens are those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from tests.model.driver import Driver, logits_of, pages_from
from tests.model.tiny import save_random
from tests.support.untyped import present

TOLERANCE, PAGE = 1e-4, 16
TRAINED, CONTEXT, PROMPT = 64, 256, 200  # tokens
SHORT, LONG = np.linspace(1.0, 1.3, 8).tolist(), np.linspace(1.2, 5.0, 8).tolist()
LLAMA: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": TRAINED,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
KINDS: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "yarn-deepseek": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1, "beta_fast": 16, "beta_slow": 2},
    "yarn-untruncated": YARN | {"truncate": False, "attention_factor": 1.1, "rope_theta": 500.0},
    "yarn-of-max-positions": {"rope_type": "yarn", "factor": 3.5},
    "longrope": LONGROPE,
    "longrope-factor": LONGROPE | {"factor": 8.0},
    "longrope-attention": LONGROPE | {"attention_factor": 1.4},
    "dynamic": DYNAMIC,
}
TRAINED_LENGTH_IS_THE_FILES_CONTEXT = ("dynamic", "yarn-of-max-positions")


def config_of(kind: str) -> LlamaConfig | Qwen3Config:
    if kind in TRAINED_LENGTH_IS_THE_FILES_CONTEXT:
        return LlamaConfig(**LLAMA | {"max_position_embeddings": TRAINED}, rope_parameters=KINDS[kind])
    if kind == "yarn-deepseek":
        return Qwen3Config(**LLAMA, rope_parameters=KINDS[kind])
    return LlamaConfig(**LLAMA, rope_parameters=KINDS[kind])


class Pair:
    """Our backend beside transformers, on the same weights."""

    def __init__(self, kind: str, path: Path, max_context: int | None = None) -> None:
        self.theirs: Any = save_random(config_of(kind), path)
        self.ours = TorchBackend(TorchConfig(path, threads=1, max_context=max_context))
        self.ours.load(lambda what, done: None)
        self.ours.allocate(3 * CONTEXT // PAGE, PAGE)
        self.pages = pages_from(1)
        # Dynamic NTK grows with the longest input that a model has had: transformers keeps its frequencies.
        self.expected([3] * self.ours.info.context_length)

    def expected(self, tokens: Sequence[int]) -> np.ndarray:
        with torch.inference_mode():
            logits: np.ndarray = self.theirs(torch.tensor([list(tokens)])).logits[0].numpy()
            return logits

    def logits(self, tokens: Sequence[int], chunks: Sequence[int]) -> np.ndarray:
        driver, first, parts = Driver(self.pages, PAGE), 0, []
        for chunk in chunks:
            [out] = self.ours.forward([driver.feed(tokens[first : first + chunk], outputs=chunk)])
            parts.append(logits_of(out))
            first += chunk
        return np.concatenate(parts)


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def fresh_pages(request: pytest.FixtureRequest) -> None:
    if "pair" in request.fixturenames:
        pair = request.getfixturevalue("pair")
        pair.ours.allocate(3 * CONTEXT // PAGE, PAGE)
        pair.pages = pages_from(1)


def tokens_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 211, count).tolist()


@pytest.mark.parametrize("chunks", [[PROMPT], [TRAINED - 1, 2, 77, 58], [1, 150, 49]])
def test_a_prompt_beyond_the_trained_length_has_transformers_logits(pair: Pair, chunks: list[int]) -> None:
    tokens = tokens_of(1, PROMPT)
    expected = pair.expected(tokens)
    assert np.abs(expected).max() > 0.5  # flat logits would prove nothing
    assert np.abs(pair.logits(tokens, chunks) - expected).max() < TOLERANCE


def test_greedy_tokens_beyond_the_trained_length_are_transformers(pair: Pair) -> None:
    prompt, count = tokens_of(2, PROMPT), 24
    theirs = pair.theirs.generate(
        torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
    )
    driver = Driver(pair.pages, PAGE)
    [out] = pair.ours.forward([driver.feed(prompt)])
    tokens = [int(logits_of(out)[-1].argmax())]
    while len(tokens) < count:
        [out] = pair.ours.forward([driver.feed([tokens[-1]])])
        tokens.append(int(logits_of(out)[-1].argmax()))
    assert tokens == theirs[0, PROMPT:].tolist()


def test_long_and_short_sequences_share_a_step_and_a_prefix(pair: Pair) -> None:
    """Pages of a prefix that was computed for a short sequence are those of a long one."""
    tokens, driver = tokens_of(3, PROMPT), Driver(pair.pages, PAGE)
    pair.ours.forward([driver.feed(tokens[:40])])
    fork, other = driver.fork(pair.ours, 32), Driver(pair.pages, PAGE)
    outs = pair.ours.forward([fork.feed(tokens[32:], outputs=1), other.feed(tokens_of(4, 9))])
    assert np.abs(logits_of(outs[0])[-1] - pair.expected(tokens)[-1]).max() < TOLERANCE


@pytest.mark.parametrize("kind", ["longrope", "longrope-attention", "dynamic"])
def test_a_context_of_the_trained_length_is_transformers_for_short_prompts(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        pair = Pair(kind, tmp_path, max_context=TRAINED)
    assert [record.levelname for record in caplog.records if "rotary" in record.message] == ["INFO"]
    tokens = tokens_of(5, TRAINED)
    assert np.abs(pair.logits(tokens, [40, 24]) - pair.expected(tokens)).max() < TOLERANCE
    pair.ours.close()


@pytest.mark.parametrize("length", [TRAINED + 1, 100, 4 * TRAINED])
def test_dynamic_ntk_is_transformers_for_a_prompt_of_the_whole_served_context(
    length: int, tmp_path: Path
) -> None:
    pair = Pair("dynamic", tmp_path, max_context=length)
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    tokens = tokens_of(6, length)
    with torch.inference_mode():
        expected = fresh(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(pair.logits(tokens, [length]) - expected).max() < TOLERANCE
    pair.ours.close()


@pytest.mark.parametrize(
    ("kind", "context"), [("yarn", 256), ("dynamic", 256), ("yarn-of-max-positions", 224)]
)
def test_the_context_is_the_trained_length_times_the_factor(kind: str, context: int, tmp_path: Path) -> None:
    save_random(config_of(kind), tmp_path)
    backend = TorchBackend(TorchConfig(tmp_path, threads=1))
    backend.load(lambda what, done: None)
    assert backend.info.context_length == context
    backend.close()


def test_a_context_above_the_models_is_refused(tmp_path: Path) -> None:
    save_random(config_of("yarn"), tmp_path)
    with pytest.raises(ModelError, match=r"max-context 257.*256"):
        TorchBackend(TorchConfig(tmp_path, max_context=257)).load(lambda what, done: None)


def test_the_served_context_of_a_model_is_in_its_fingerprint(tmp_path: Path) -> None:
    """Executors that rotate for different lengths must not continue each other's sequences."""
    save_random(config_of("longrope"), tmp_path)

    def fingerprint(max_context: int | None) -> bytes:
        backend = TorchBackend(TorchConfig(tmp_path, threads=1, max_context=max_context))
        backend.load(lambda what, done: None)
        backend.close()
        return present(backend.info).fingerprint

    assert fingerprint(None) == fingerprint(CONTEXT) != fingerprint(TRAINED)
