"""`GrammarCompiler`: compiles grammars beside the device and the event loop, and keeps the last ones."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from service_kit.logs import Log

from executor_service.backends.base import ModelDescription, TokenizerBundle
from executor_service.contract.grammar import Grammar
from executor_service.grammar.late import LateGrammar
from executor_service.grammar.source import UNTRIED, GrammarInvalid, GrammarSource

if TYPE_CHECKING:
    from executor_service.grammar.tried_engine import TriedEngine

log = Log(__name__)

MAX_GRAMMAR_BYTES = 128 << 10
COMPILE_FUEL, STEP_FUEL = 250_000, 50_000

_THREADS = 2
_KEPT = 64  # compiled grammars, some kB each, at worst 40 MB; and refusals


class GrammarCompiler:
    """One for each loaded model. All methods: the event loop's thread."""

    def __init__(self, engine: TriedEngine, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._engine = engine
        self._vocab_size, self._ends = vocab_size, frozenset(eos_token_ids)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._kept: OrderedDict[GrammarSource, asyncio.Future[Grammar | str]] = OrderedDict()

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints and vocabularies, equal masks."""
        return self._engine.fingerprint

    async def get(self, source: GrammarSource) -> Grammar | str:
        """The compiled grammar, or why there is none; compiled once, however many wait for it.

        Where it begins makes no difference to that.
        """
        if source.begins_after is not None:
            return await self._late(source, source.begins_after)
        future = self._kept.get(source)
        if future is None:
            loop = asyncio.get_running_loop()
            future = self._kept[source] = loop.run_in_executor(self._threads, self._compile, source)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(source)
        compiled = await asyncio.shield(future)  # others may wait for it, too
        if compiled == UNTRIED and self._kept.get(source) is future:
            del self._kept[source]
        return compiled

    async def _late(self, source: GrammarSource, begins_after: int) -> Grammar | str:
        if begins_after in self._ends:
            return f"begins_after: token {begins_after} ends a sequence"
        compiled = await self.get(replace(source, begins_after=None))
        if isinstance(compiled, str):
            return compiled
        return LateGrammar(compiled, begins_after, self._vocab_size, self._ends)

    def close(self) -> None:
        """End the threads; what they compile is not wanted any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._engine.close()

    def _compile(self, source: GrammarSource) -> Grammar | str:
        try:
            compiled = self._engine.compile(source)
            if compiled.warnings:
                log.info("parts of a grammar have no effect", warnings="; ".join(compiled.warnings))
            return compiled
        except GrammarInvalid as error:
            return str(error)


def grammar_compiler(tokenizer: TokenizerBundle | None, info: ModelDescription) -> GrammarCompiler | None:
    """The compiler for a model; None, where its tokenizer allows none."""
    if tokenizer is None:
        return None
    # Only here: what needs no grammars does not load the library.
    from executor_service.grammar.engine import GrammarEngine
    from executor_service.grammar.tokenizer import TokenizerUnsupported
    from executor_service.grammar.tried_engine import TriedEngine

    ends = tuple(info.eos_token_ids)
    try:
        engine = GrammarEngine(tokenizer.tokenizer_json, info.vocab_size, ends, COMPILE_FUEL, STEP_FUEL)
    except TokenizerUnsupported as error:
        log.warning("no grammars for this tokenizer", why=str(error))
        return None
    settings = {
        "tokenizer_json": tokenizer.tokenizer_json.decode(),
        "vocab_size": info.vocab_size,
        "eos_token_ids": ends,
        "compile_fuel": COMPILE_FUEL,
        "step_fuel": STEP_FUEL,
    }
    return GrammarCompiler(TriedEngine(engine, settings, _THREADS), info.vocab_size, ends)
