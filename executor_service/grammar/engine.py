"""`GrammarEngine`: compiles grammars for one tokenizer, by llguidance; `TokenMatcher` is a `Matcher` of it.

llguidance runs an Earley parser over a lexer of regular expressions' derivatives, along a trie of the
vocabulary. Its limits count work. It does not count the tokens that end a sequence: a rollback over one of
them would take back a token of the text. So what stands after a text's end is kept here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import ParamSpec, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, StructTag
from numpy.typing import NDArray

from executor_service.contract.grammar import GrammarStuck
from executor_service.contract.masks import Masks, mask_bytes
from executor_service.grammar.ambiguity import RuleCounts, rules_of
from executor_service.grammar.escapes import OUTSIDE, Escapes
from executor_service.grammar.lark import engine_lark
from executor_service.grammar.narrowed_schema import engine_schema, engine_schema_text
from executor_service.grammar.source import GrammarInvalid, GrammarSource, choices_regex, tagged_parts
from executor_service.grammar.tokenizer import TokenizerUnsupported, engine_tokenizer

P = ParamSpec("P")
T = TypeVar("T")

_REVISION = 4
"""Of this file; raised whenever the same grammar would allow other tokens."""

# Beside the fuel. With more symbols, compiling takes seconds; a state takes 1 to 2 kB.
_MAX_SYMBOLS, _MAX_ITEMS, _MAX_STATES = 20_000, 15_000, 20_000
# Of the parser, after one terminal. In JSON they are bounded by the schema: 4 for an optional property.
# In an ambiguous grammar of rules they grow with the text, and the work for a token with their cube.
_MAX_ROW_ITEMS, _MAX_AMBIGUOUS_ITEMS = 1000, 250
# Of a mask: items times `RuleCounts.row_work`, down to a third of the items.
_MAX_WORK = 3_000_000
# Items are counted for each mask, but not along a token that is consumed. In grammars of rules the mask comes
# first, as it does where an output is sampled, before a token of more bytes than this (a line of 64 "=").
_MAX_UNCOUNTED_BYTES = 8
_RUN = 16  # tokens
_MAX_MESSAGE = 300  # characters
_MAX_WARNINGS = 16
_MAX_SPELLED = 64  # bytes
NOTHING: frozenset[int] = frozenset()
_NO_TOKEN = "the grammar allows no token here"
_NO_EXTENSION = "NoExtensionBias"  # how the library says so

# Parts of the library's messages.
_EXCERPT = re.compile(r"^ *(?:\d+ \| .*|\^+) *$", re.MULTILINE)  # a line of the grammar, and a mark below it
_REGEX_ERROR = re.compile(
    r'(?:invalid regex "[^\n]*" \(in \w+\): )?regex parse error:\n.*?\berror: ', re.DOTALL
)
_LIBRARY_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_PLACE = re.compile(r"^line \d+, column \d+: ")
_PANIC = "PanicException"  # of Rust code; its class can't be imported, and is no Exception


class GrammarEngine:
    """Compiles grammars; any thread."""

    def __init__(
        self,
        tokenizer_json: bytes,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        compile_fuel: int,
        step_fuel: int,
    ) -> None:
        """Raises TokenizerUnsupported."""
        if not eos_token_ids:
            raise TokenizerUnsupported("the model has no token that ends a sequence")
        self._tokenizer = engine_tokenizer(tokenizer_json, vocab_size, eos_token_ids)
        self.ends = frozenset(eos_token_ids)
        self.end_bits = [(token >> 3, 1 << (token & 7)) for token in eos_token_ids]
        bits = np.zeros(8 * mask_bytes(vocab_size), np.uint8)
        bits[list(eos_token_ids)] = 1
        self.end_mask: Masks = np.packbits(bits, bitorder="little")
        tokens = [self._tokenizer.decode_bytes([token]) for token in range(vocab_size)]
        self.escapes = Escapes(tokens, mask_bytes(vocab_size))
        self.long_tokens = frozenset(
            token for token, text in enumerate(tokens) if len(text) > _MAX_UNCOUNTED_BYTES
        )
        self._compile_fuel, self._step_fuel = compile_fuel, step_fuel

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints and vocabularies, equal masks."""
        return f"llguidance-{metadata.version('llguidance')}/{_REVISION}"

    def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Compile a grammar, and look what it allows first. Raises GrammarInvalid; takes a second at most."""
        try:
            escapes = self.escapes if source.kind == "json_schema" else None
            warnings: list[str] = []
            text = self._text(source, warnings)
            kept = tuple(dict.fromkeys(warnings))[:_MAX_WARNINGS]
            compiled = CompiledGrammar(self, text, escapes, rules_of(source), kept)
            probe = compiled.matcher()
            probe.consume(np.flatnonzero(np.unpackbits(probe.mask(), bitorder="little"))[:1].astype(np.int32))
            probe.forced()  # here a grammar is found out that forces a text without end
            self._try_second(probe)
        except GrammarStuck as error:
            # Of other kinds, the place lies in a grammar that was made of the caller's text.
            message = str(error) if source.kind == "lark" else _PLACE.sub("", str(error))
            raise GrammarInvalid(message) from None
        return compiled

    def _try_second(self, probe: TokenMatcher) -> None:
        """Find out what exceeds the limits after its first token. Raises GrammarStuck."""
        try:
            probe.mask()
        except GrammarStuck as error:
            if str(error) != _NO_TOKEN:  # other first tokens may lead on
                raise

    def start(self, text: str, rules: RuleCounts | None) -> LLMatcher:
        """The library's matcher of the empty text. `rules`: by which it may be ambiguous.

        Raises GrammarStuck.
        """
        max_row_items, max_items = _MAX_ROW_ITEMS, _MAX_ITEMS
        if rules is not None:
            max_row_items = min(max_row_items, _MAX_AMBIGUOUS_ITEMS + 2 * rules.alternatives)
            max_items = min(max_items, max(_MAX_WORK // max(rules.row_work, 1), _MAX_ITEMS // 3))
        limits = LLParserLimits(
            initial_lexer_fuel=self._compile_fuel,
            step_lexer_fuel=self._step_fuel,
            max_items_in_row=max_row_items,
            step_max_items=max_items,
            max_lexer_states=_MAX_STATES,
            max_grammar_size=_MAX_SYMBOLS,
            verbose_errors=False,
        )
        try:
            matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        except BaseException as error:
            if type(error).__name__ != _PANIC:
                raise
            raise GrammarStuck("the grammar engine failed on this grammar") from None
        if matcher.is_error():
            raise GrammarStuck(_message(matcher))
        return matcher

    def spelled(self, text: bytes) -> list[int]:
        """Tokens that a text may begin with: special ones excluded, that of its first byte included."""
        prefixes = (text[:length] for length in range(1, min(len(text), _MAX_SPELLED) + 1))
        tokens = [self._tokenizer.tokenize_bytes(prefix) for prefix in prefixes]
        return [one[0] for one in tokens if len(one) == 1 and not self._tokenizer.is_special_token(one[0])]

    def _text(self, source: GrammarSource, warnings: list[str]) -> str:
        match source.kind:
            case "json_schema":
                try:
                    return LLMatcher.grammar_from_json_schema(engine_schema_text(source.text, warnings))
                except ValueError as error:
                    raise GrammarInvalid(f"no JSON schema: {error}") from None
            case "regex":
                return LLMatcher.grammar_from_regex(source.text)
            case "choices":
                return LLMatcher.grammar_from_regex(choices_regex(source.choices))
            case "lark":
                return LLMatcher.grammar_from_lark(engine_lark(source.text, warnings))
            case "structural_tag":
                return self._structural_tag(source.text, warnings)

    def _structural_tag(self, text: str, warnings: list[str]) -> str:
        parts = tagged_parts(text)
        looks_special = [part.trigger for part in parts if part.trigger[0] == "<" and part.trigger[-1] == ">"]
        special = [trigger for trigger in looks_special if self._is_special(trigger)]
        if special and len(special) < len(looks_special):
            raise GrammarInvalid(
                "triggers: of those in angle brackets, some are special tokens and some are not"
            )
        tags = [
            StructTag(
                trigger=part.trigger,
                begin=part.begin,
                grammar=engine_lark(part.grammar, warnings)
                if isinstance(part.grammar, str)
                else engine_schema(part.grammar, warnings),
                end=part.end,
            )
            for part in parts
        ]
        return StructTag.to_grammar(tags, assume_special=bool(special))

    def _is_special(self, text: str) -> bool:
        """Whether a text is one special token."""
        tokens = self._tokenizer.tokenize_str(text, parse_special=True)
        return len(tokens) == 1 and self._tokenizer.is_special_token(tokens[0])


class SharedLexer:
    """What the matchers of one grammar share: the library's copies have one lexer, its states and its fuel.

    So what one of them has computed is there for all. And when one of them has used up the lexer's fuel or
    states, the others would find tokens not allowed that are: none of them is asked again.
    """

    __slots__ = ("exhausted", "matchers", "start")

    def __init__(self, start: LLMatcher) -> None:
        self.start = start
        self.exhausted = False
        self.matchers = 0  # how many were made


class CompiledGrammar:
    """Implements `Grammar`. After it was compiled: the device thread."""

    def __init__(
        self,
        engine: GrammarEngine,
        text: str,
        escapes: Escapes | None,
        rules: RuleCounts | None,
        warnings: tuple[str, ...] = (),
    ) -> None:
        """`escapes`: of texts that are JSON as a whole; `rules`: as for `start`. Raises GrammarStuck."""
        self.warnings = warnings
        self._engine, self._text, self._escapes, self._rules = engine, text, escapes, rules
        self._lexer = SharedLexer(engine.start(text, rules))

    def matcher(self, *, alone: bool = False) -> TokenMatcher:
        """As `Grammar.matcher`; with another lexer than the others', if theirs is exhausted."""
        lexer = self._lexer
        if alone or lexer.exhausted:
            lexer = SharedLexer(self._engine.start(self._text, self._rules))
            if not alone:
                self._lexer = lexer
        masked_first = NOTHING if self._rules is None else self._engine.long_tokens
        return TokenMatcher(self._engine, lexer, self._escapes, masked_first)


class TokenMatcher:
    """Implements `Matcher`."""

    __slots__ = ("_ended", "_engine", "_escapes", "_lexer", "_masked_first", "_matcher", "_states")

    def __init__(
        self,
        engine: GrammarEngine,
        lexer: SharedLexer,
        escapes: Escapes | None,
        masked_first: frozenset[int] = NOTHING,
    ) -> None:
        """`masked_first`: tokens before which the mask is computed, as that counts the work for them."""
        self._engine, self._lexer, self._matcher = engine, lexer, lexer.start.deep_copy()
        lexer.matchers += 1
        self._escapes = escapes
        self._masked_first = masked_first
        self._states = [OUTSIDE]  # of the escapes, before the text and after each token of it
        self._ended = 0  # tokens after the text: only those that end a sequence

    def consume(self, tokens: NDArray[np.int32]) -> int:
        """As `Matcher.consume`."""
        ids, ends, count = tokens.tolist(), self._engine.ends, 0
        while count < len(ids):
            if self._ended or (ids[count] in ends and self._matcher.is_accepting()):
                if ids[count] not in ends:
                    break
                self._ended += 1
                count += 1
                continue
            stop = next((i for i in range(count + 1, len(ids)) if ids[i] in ends), len(ids))
            run = ids[count:stop]
            if self._escapes is not None:
                states = self._escapes.follow(self._states[-1], run)
                run = run[: len(states)]
                taken = self._try_consume(run)
                self._states += states[:taken]
            else:
                taken = self._try_consume(run)
            count += taken
            if count < stop:
                break
        return count

    def rollback(self, count: int) -> None:
        """As `Matcher.rollback`."""
        ended = min(count, self._ended)
        self._ended -= ended
        if count > ended:
            self._ask(self._matcher.rollback, count - ended)
            if self._escapes is not None:
                del self._states[ended - count :]

    def mask(self) -> Masks:
        """As `Matcher.mask`."""
        if self._ended:
            return self._engine.end_mask
        packed = np.frombuffer(self._ask(self._matcher.compute_bitmask), np.uint8)
        # The library's have room for one token more than there are.
        mask: Masks = packed[: self._engine.end_mask.nbytes]
        if self._escapes is not None:
            mask = mask & self._escapes.masks[self._states[-1]]
        if self._matcher.is_accepting():
            return mask
        if any(mask[byte] & bit for byte, bit in self._engine.end_bits):
            # Named by the grammar, or spelled by it: a token that ends a sequence can't be inside of a text.
            mask = mask & ~self._engine.end_mask
        used = np.count_nonzero(mask)
        return mask if used > 1 or (used and self._consumable(mask)) else self._spelled(len(mask))

    def forced(self) -> list[int]:
        """As `Matcher.forced`."""
        if self._ended:
            return []
        tokens = self._ask(self._matcher.compute_ff_tokens)
        if self._escapes is not None:
            tokens = tokens[: len(self._escapes.follow(self._states[-1], tokens))]
        return tokens[: self._ask(self._matcher.validate_tokens, tokens)] if tokens else []

    def _try_consume(self, tokens: list[int]) -> int:
        """How many of these tokens were allowed, and consumed. Raises GrammarStuck."""
        taken = 0
        while taken < len(tokens):
            if tokens[taken] in self._masked_first:
                self._ask(self._matcher.compute_bitmask)
            run = self._run(tokens, taken)
            count = self._ask(self._matcher.try_consume_tokens, run)
            taken += count
            if count < len(run):
                # An exhausted lexer allows no token, and only what computes a mask tells that it is an error.
                self._ask(self._matcher.compute_bitmask)
                break
        return taken

    def _run(self, tokens: list[int], start: int) -> list[int]:
        """Tokens to consume at once, up to one that is masked first. No other thread runs meanwhile."""
        run = tokens[start : start + _RUN]
        end = next((i for i in range(1, len(run)) if run[i] in self._masked_first), len(run))
        return run[:end]

    def _consumable(self, mask: Masks) -> bool:
        """Whether what a mask of one byte allows is allowed."""
        at = int(mask.argmax())  # looking at every bit would take longer than the mask
        byte = int(mask[at])
        ids = [8 * at + bit for bit in range(8) if byte >> bit & 1]
        return len(ids) > 1 or self._ask(self._matcher.validate_tokens, ids) > 0

    def _spelled(self, size: int) -> Masks:
        """The mask of `size` bytes where a text is forced that spells a special token.

        Of forced text the library allows what the tokenizer makes of it. Of such a text that is the
        special token, which stands for no text; here any other tokens are allowed that spell it.
        """
        tokens = self._ask(self._engine.spelled, self._ask(self._matcher.compute_ff_bytes))
        ids = [token for token in tokens if self._ask(self._matcher.validate_tokens, [token])]
        if not ids:
            raise self._stuck(_NO_TOKEN)
        bits = np.zeros(8 * size, np.uint8)
        bits[ids] = 1
        return np.packbits(bits, bitorder="little")

    def _ask(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the library's matcher. Raises GrammarStuck where that ends in an error."""
        if self._lexer.exhausted:
            raise self._stuck("a matcher beside this one was stuck")
        try:
            answer = method(*args, **kwargs)
        except BaseException as error:
            if type(error).__name__ != _PANIC:
                raise
            raise self._stuck("the grammar engine failed on this grammar") from None
        if self._matcher.is_error():
            raise self._stuck(_message(self._matcher))
        return answer

    def _stuck(self, why: str) -> GrammarStuck:
        """The error to raise: its lexer may be exhausted, and is for no other matcher."""
        self._lexer.exhausted = True
        return GrammarStuck(why, by_others=self._lexer.matchers > 1)


def _message(matcher: LLMatcher) -> str:
    """Why a matcher is in error, in one line: without excerpts of the grammar, which the caller has."""
    text = _REGEX_ERROR.sub(
        "invalid regex: ", _EXCERPT.sub("", matcher.get_error().replace("<non-verbose/>", ""))
    )
    text = _LIBRARY_PLACE.sub(r"line \1, column \2: ", " ".join(text.split()))
    return _NO_TOKEN if text in ("", _NO_EXTENSION) else text[:_MAX_MESSAGE]
