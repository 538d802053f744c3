"""The default model answers as transformers does, token by token."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.contract.plan import OutputMode, Sampling
from tests.model.default_model import default_model, varied_text
from tests.model.driver import Driver, logits_of, pages_from
from tests.model.many_texts import check_scores, lengths_of_200

pytestmark = [
    pytest.mark.model,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

NEW_TOKENS = 16
TIE = 1e-3  # logit gap below which fp32 sums in another order may choose the other token


@dataclass
class Models:
    ours: TorchBackend
    theirs: Any
    tokenizer: Tokenizer


@pytest.fixture(scope="module")
def gguf_read_once() -> Iterator[None]:
    """transformers parses the file three times and makes its table of names 400 times: half a minute.

    Its 100,000 strings are slices of a memory map, of which numpy makes two objects each: 2 s.
    """
    memmap = np.memmap
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", lambda *given, **named: memmap(*given, **named).view(np.ndarray))
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        yield


@pytest.fixture(scope="module")
def models(gguf_read_once: None) -> Iterator[Models]:
    from transformers import AutoModelForCausalLM

    path = default_model()
    ours = TorchBackend(TorchConfig(path))
    ours.load(lambda what, done: None)
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    tokenizer = Tokenizer.from_str(ours.tokenizer().tokenizer_json.decode())
    yield Models(ours, theirs, tokenizer)
    ours.close()


def prompts_of(tokenizer: Tokenizer, lengths: Sequence[int]) -> list[list[int]]:
    ids = tokenizer.encode(varied_text()).ids
    starts = np.random.default_rng(3).integers(0, len(ids) - max(lengths), len(lengths))
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def our_answers(backend: TorchBackend, prompts: Sequence[list[int]]) -> list[list[int]]:
    """All prompts in chunks of 200, batched; each row decodes as soon as its prompt is in."""
    page = 16
    backend.allocate(1 + sum(-(-(len(p) + NEW_TOKENS) // page) for p in prompts) + len(prompts), page)
    pages = pages_from(1)
    drivers = [Driver(pages, page) for _ in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    while any(len(answer) < NEW_TOKENS for answer in answers):
        rows, owners = [], []
        for i, (driver, prompt, answer) in enumerate(zip(drivers, prompts, answers, strict=True)):
            known = prompt + answer
            if len(answer) < NEW_TOKENS:
                fed = known[driver.length : driver.length + 200]
                complete = driver.length + len(fed) == len(known)
                rows.append(driver.feed(fed, outputs=int(complete), output=OutputMode.SAMPLE))
                owners.append(i)
        for i, out in zip(owners, backend.forward(rows), strict=True):
            if out.tokens is not None:
                answers[i].append(int(out.tokens[0]))
    return answers


def check(models: Models, lengths: Sequence[int]) -> None:
    prompts = prompts_of(models.tokenizer, lengths)
    ties = []
    for prompt, ours in zip(prompts, our_answers(models.ours, prompts), strict=True):
        with torch.inference_mode():  # teacher forcing: one pass gives all of transformers' choices
            logits = models.theirs(torch.tensor([prompt + ours])).logits[0, len(prompt) - 1 : -1]
        for step, (chosen, row) in enumerate(zip(ours, logits, strict=True)):
            gap = float(row.max() - row[chosen])
            if gap == 0:
                continue
            assert gap < TIE, f"prompt of {len(prompt)}: token {step} differs at a gap of {gap}"
            ties.append((len(prompt), step, gap))
    print(f"{len(prompts)} prompts, ties decided otherwise: {ties}")


def test_greedy_answers_equal_transformers(models: Models) -> None:
    check(models, [10, 64])


@pytest.mark.long
def test_so_do_those_to_a_long_prompt(models: Models) -> None:
    check(models, [250])


@pytest.mark.slow
def test_greedy_answers_equal_transformers_on_50_prompts(models: Models) -> None:
    check(models, np.linspace(10, 1000, 50).astype(int).tolist())


def test_logits_equal_transformers(models: Models) -> None:
    [prompt] = prompts_of(models.tokenizer, [300])
    models.ours.allocate(40, 16)
    [out] = models.ours.forward([Driver(pages_from(1), 16).feed(prompt, outputs=300)])
    with torch.inference_mode():
        theirs = models.theirs(torch.tensor([prompt])).logits[0].numpy()
    assert np.abs(logits_of(out) - theirs).max() < 2e-3  # of logits up to 30, after 30 layers


@pytest.mark.slow
def test_scores_of_200_texts_equal_transformers(models: Models) -> None:
    check_scores(models.ours, models.theirs, prompts_of(models.tokenizer, lengths_of_200()))


def test_knows_the_capital_of_france(models: Models) -> None:
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompt = models.tokenizer.encode(text).ids
    assert "Paris" in models.tokenizer.decode(our_answers(models.ours, [prompt])[0])


def test_a_row_is_bitwise_the_same_in_any_batch(models: Models) -> None:
    prompts = prompts_of(models.tokenizer, [100, 30, 61, 7, 200])

    def last_logits(company: Sequence[list[int]], chunks: Sequence[int]) -> np.ndarray:
        models.ours.allocate(60, 16)
        pages = pages_from(1)
        driver, first = Driver(pages, 16), 0
        for chunk in chunks:
            rows = [Driver(pages, 16).feed(p) for p in company]
            out = models.ours.forward([*rows, driver.feed(prompts[0][first : first + chunk])])[-1]
            first += chunk
        return logits_of(out)

    alone = last_logits([], [100])
    assert np.array_equal(alone, last_logits(prompts[1:], [100]))
    assert np.array_equal(alone, last_logits([], [50, 49, 1]))
    assert np.array_equal(alone, last_logits(prompts[3:4], [64, 36]))


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_batch(models: Models) -> None:
    [prompt] = prompts_of(models.tokenizer, [40])
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=9)

    def token(company: int) -> int:
        models.ours.allocate(40, 16)
        pages = pages_from(1)
        rows = [Driver(pages, 16).feed(prompt[: 5 + i], output=OutputMode.SAMPLE) for i in range(company)]
        row = Driver(pages, 16).feed(prompt, output=OutputMode.SAMPLE, sampling=sampling)
        out = models.ours.forward([*rows, row])[-1]
        assert out.tokens is not None
        return int(out.tokens[0])

    assert token(0) == token(3) == token(6)


SAMPLES = [
    "The quick brown fox jumps over 13 lazy dogs, 1234567 times.",
    "  leading, trailing   and\t\ttabs \n\n\n newlines \r\n",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # comment\n",
    "naïve café — “quotes” … Ελληνικά, русский, 中文字符, 日本語, العربية, हिन्दी",
    "emoji 👩‍👩‍👧‍👦🇫🇷 a͡b ™ ∑ → ▁",
    "don't we'll I'M it's 'quoted' 10.5% $3,000.00 a1b2c3",
    "<|im_start|>user\nhi<|im_end|><|endoftext|> <|im_start|>",
    "\u00a0\u2003\u200bzero\ufeffwidth\x00\x07",
    "",
    " ",
    "a" * 300,
]


def test_tokenizer_splits_numeric_characters_as_the_model_was_trained(models: Models) -> None:
    # The file's pre-tokenizer is smollm: every numeric character alone. transformers reads GPT-2's instead,
    # which joins a fraction or a superscript with the space before it; on digits the two agree.
    def ids(text: str) -> list[int]:
        found: list[int] = models.tokenizer.encode(text).ids
        return found

    for text in (" ½", "x²", " ٣٤", "①②", " 12"):
        assert ids(text) == [i for character in text for i in ids(character)]


def test_tokenizer_equals_transformers(models: Models) -> None:
    from transformers import AutoTokenizer

    path = default_model()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in [*SAMPLES, varied_text()[:20_000]]:
        ids = models.tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False), text[:60]
        assert models.tokenizer.decode(ids, skip_special_tokens=False) == text
