"""What compiling a grammar, a mask and forced tokens take, by the vocabulary's size; and how much is forced.

The vocabularies are the default model's, a part of it, and wider ones: those have texts of two tokens more.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from executor_service.backends.torch_backend.files.gguf_checkpoint import GgufCheckpoint
from executor_service.backends.torch_backend.files.tokenizer_files import tokenizer_from_gguf
from executor_service.contract.masks import allowed_tokens
from executor_service.grammar.automaton import Automaton
from executor_service.grammar.engine import GrammarEngine
from executor_service.grammar.source import GrammarSource
from executor_service.runtime.grammars import COMPILE_FUEL, STEP_FUEL
from tests.model.default_model import default_model

VOCABULARIES = (49_152, 151_936)
COMPILES, OUTPUTS, TOKENS = 5, 8, 96


class Vocabulary(NamedTuple):
    """A tokenizer as `GrammarEngine` takes it."""

    tokenizer_json: bytes
    size: int
    ends: tuple[int, ...]

    def engine(self) -> GrammarEngine:
        """Its grammar engine."""
        return GrammarEngine(self.tokenizer_json, self.size, self.ends, COMPILE_FUEL, STEP_FUEL)


@cache
def default_vocabulary() -> Vocabulary:
    """The default model's."""
    with closing(GgufCheckpoint(default_model())) as checkpoint:
        files = tokenizer_from_gguf(checkpoint.file)
        return Vocabulary(
            files.tokenizer_json, checkpoint.spec.vocab_size, tuple(checkpoint.spec.eos_token_ids)
        )


def widened(vocabulary: Vocabulary, size: int) -> Vocabulary:
    """The vocabulary with more entries, each the text of two others; no text is tokenized into them."""
    if size <= vocabulary.size:
        return vocabulary
    tokenizer: dict[str, Any] = json.loads(vocabulary.tokenizer_json)
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    words = [word for word in list(vocab)[300:] if len(word) > 1]
    joined = (
        one + other for step in itertools.count(1) for one, other in zip(words, words[step:], strict=False)
    )
    for word in joined:
        if len(vocab) >= size:
            break
        vocab.setdefault(word, len(vocab))
    return Vocabulary(json.dumps(tokenizer).encode(), size, vocabulary.ends)


class Costs:
    """Times in microseconds, of random outputs of the schemas."""

    def __init__(self, schemas: Mapping[str, str]) -> None:
        self._sources = {name: GrammarSource("json_schema", schema) for name, schema in schemas.items()}

    def of(self, vocabulary: Vocabulary) -> Iterator[tuple[str, list[float]]]:
        """Name and times of each thing that is timed."""
        engine, rng = vocabulary.engine(), np.random.default_rng(0)
        compiling: list[float] = []
        masks: list[float] = []
        forcing: list[float] = []
        for source in self._sources.values():
            for _ in range(COMPILES):
                began = time.perf_counter()
                grammar = engine.compile(source)
                compiling.append(1e6 * (time.perf_counter() - began))
            for _ in range(OUTPUTS):
                automaton, output = Automaton(grammar), np.zeros(0, np.int32)
                for _ in range(TOKENS):
                    began = time.perf_counter()
                    automaton.follow(output)
                    mask = automaton.mask()
                    masked = time.perf_counter()
                    automaton.forced()
                    masks.append(1e6 * (masked - began))
                    forcing.append(1e6 * (time.perf_counter() - masked))
                    following = np.flatnonzero(allowed_tokens(mask, vocabulary.size))
                    output = np.append(output, np.int32(rng.choice(following)))
        yield "compile", compiling
        yield "mask", masks
        yield "forced", forcing


def print_costs(costs: Costs) -> None:
    """A line for each vocabulary and thing."""
    for size in VOCABULARIES:
        for name, times in costs.of(widened(default_vocabulary(), size)):
            print(
                f"{size} tokens, {name}: median {statistics.median(times):.0f}, "
                f"mean {statistics.mean(times):.0f}, max {max(times):.0f} us",
                flush=True,
            )


def forced_share(schema: str, outputs: Sequence[Sequence[int]]) -> float:
    """The share of the outputs' tokens that their schema forced."""
    grammar = default_vocabulary().engine().compile(GrammarSource("json_schema", schema))
    forced = total = 0
    for output in outputs:
        automaton, tokens = Automaton(grammar), np.array(output, np.int32)
        for length in range(len(tokens)):
            automaton.follow(tokens[:length])
            forced += bool(automaton.forced())
        total += len(tokens)
    return forced / total
