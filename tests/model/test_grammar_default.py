"""Grammars over the default model's tokenizer, where a text has many tokenizations: as good as replays."""

from __future__ import annotations

import json
import re
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from executor_service.backends.torch_backend.files.gguf_checkpoint import GgufCheckpoint
from executor_service.backends.torch_backend.files.tokenizer_files import tokenizer_from_gguf
from executor_service.contract.masks import allowed_tokens
from executor_service.grammar.automaton import Automaton
from executor_service.grammar.engine import GrammarEngine
from executor_service.grammar.source import GrammarSource
from executor_service.runtime.grammars import COMPILE_FUEL, STEP_FUEL
from tests.model.default_model import default_model

pytestmark = pytest.mark.model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "born": {"type": "string", "format": "date"},
        "parents": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[A-Z][a-zé]{1,9}$"},
            "maxItems": 2,
        },
        "married": {"type": ["boolean", "null"]},
    },
    "required": ["name", "born", "parents", "married"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": (GrammarSource("json_schema", json.dumps(SCHEMA)), ""),
    "regex": (
        GrammarSource("regex", r"(Paris|Pari|Berlin)( [0-9]{2,5}){1,3}\."),
        r"(Paris|Pari|Berlin)( [0-9]{2,5}){1,3}\.",
    ),
    "choices": (GrammarSource("choices", choices=("yes", "no", "yes, but", "ü€")), "yes|no|yes, but|ü€"),
    "lark": (GrammarSource("lark", 'start: "<b>" start "</b>" | /[a-z ]{1,9}/'), "(<b>)*[a-z ]{1,9}(</b>)*"),
}


class Words:
    """The model's tokenizer, and grammars for it."""

    def __init__(self) -> None:
        with closing(GgufCheckpoint(default_model())) as checkpoint:
            files = tokenizer_from_gguf(checkpoint.file)
            self.vocabulary, self.ends = checkpoint.spec.vocab_size, tuple(checkpoint.spec.eos_token_ids)
        self.tokenizer = Tokenizer.from_str(files.tokenizer_json.decode())
        self.engine = GrammarEngine(files.tokenizer_json, self.vocabulary, self.ends, COMPILE_FUEL, STEP_FUEL)

    def allowed(self, automaton: Automaton) -> list[int]:
        found: list[int] = np.flatnonzero(allowed_tokens(automaton.mask(), self.vocabulary)).tolist()
        return found


@pytest.fixture(scope="module")
def words() -> Words:
    return Words()


WALKS = st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 1 << 20), max_size=9)), max_size=6)


@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=40, deadline=None)
@given(turns=WALKS)
def test_whatever_way_an_automaton_came_it_allows_what_a_fresh_one_does(
    words: Words, name: str, turns: list[tuple[int, list[int]]]
) -> None:
    grammar = words.engine.compile(GRAMMARS[name][0])
    automaton, output = Automaton(grammar), np.zeros(0, np.int32)
    for keep, choices in turns:
        output = output[:keep]
        automaton.follow(output)
        for choice in choices:
            following = words.allowed(automaton)
            automaton.forced()
            output = np.append(output, np.int32(following[choice % len(following)]))
            assert automaton.follow(output) == len(output)
        fresh = Automaton(grammar)
        assert fresh.follow(output) == len(output)
        assert automaton.mask().tobytes() == fresh.mask().tobytes()
        assert automaton.forced() == fresh.forced()


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("seed", range(6))
def test_what_ends_is_a_text_of_the_grammar(words: Words, name: str, seed: int) -> None:
    """Tokens drawn at random from the masks; hints are taken now and then, as drafts that are accepted."""
    source, pattern = GRAMMARS[name]
    automaton, rng = Automaton(words.engine.compile(source)), np.random.default_rng(seed)
    output: list[int] = []
    while not set(words.ends) & set(output):
        following = words.allowed(automaton)
        forced = automaton.forced()
        if forced:
            assert following == forced[:1]
        ending = [token for token in words.ends if token in following]
        output.append(int(rng.choice(ending if ending and len(output) > 60 else following)))
        assert automaton.follow(np.array(output, np.int32)) == len(output)
        assert len(output) < 400
    text = words.tokenizer.decode([token for token in output if token not in words.ends])
    if pattern:
        assert re.fullmatch(pattern, text)
    else:
        value = json.loads(text)
        assert set(value) == set(SCHEMA["properties"])  # type: ignore[call-overload]
        assert text == json.dumps(value, ensure_ascii=False)


def test_any_tokenization_of_an_allowed_text_may_be_given(words: Words) -> None:
    grammar = words.engine.compile(GRAMMARS["regex"][0])
    whole = words.tokenizer.encode("Paris 123 45.", add_special_tokens=False).ids
    letters = [words.tokenizer.token_to_id(letter.replace(" ", "Ġ")) for letter in "Paris 123 45."]
    states = []
    for tokens in (whole, letters):
        automaton = Automaton(grammar)
        assert automaton.follow(np.array(tokens, np.int32)) == len(tokens)
        states.append(automaton.mask().tobytes())
    assert states[0] == states[1]
