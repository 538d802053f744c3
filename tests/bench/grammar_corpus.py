"""Output that must match, judged by others: 500 JSON schemas, 100 regular expressions, 50 Lark grammars.

usage: python -m tests.bench.grammar_corpus [ADDRESS] [--dtype int8] [--streams 16] [--max-tokens 1000]
           [--kinds messages,store,made,regex,lark] [--every 1] [--seed 0] [--json FILE]

Without ADDRESS it starts a stack of its own with the default model. Each grammar (tests/grammars/corpus.py;
the schemas need the `corpus` extra) is asked once through Generate at temperature 1, `--streams` at once,
with examples of short answers before the question (tests/grammars/prompts.py).

What ends by itself must be a text of the grammar, says a library that has nothing to do with the engine:
jsonschema, with the formats that it can check; `re`; `lark`. What was cut off must be the beginning of one:
its tokens are replayed by a matcher that has seen nothing else and continued from its masks to an end, and
the whole text is judged as above. Prints a table, what was refused and why, and a verdict; exit status 1 if a
figure is beyond its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import aio, errors
from paceline.types import FinishReason
from tokenizers import Tokenizer

from executor_service.backends.torch_backend.files.gguf_checkpoint import GgufCheckpoint
from executor_service.backends.torch_backend.files.tokenizer_files import tokenizer_from_gguf
from executor_service.contract.grammar import GrammarStuck
from executor_service.grammar.engine import GrammarEngine
from executor_service.grammar.source import GrammarSource
from executor_service.runtime.grammars import COMPILE_FUEL, STEP_FUEL
from tests.bench.figures import Line
from tests.grammars.corpus import CorpusGrammar, all_larks, all_regexes, all_schemas
from tests.grammars.judges import complaint
from tests.grammars.prompts import conversation
from tests.grammars.walks import Walker
from tests.model.default_model import default_model
from tests.support.stack import oracle_stack

ORIGINS = ("messages", "store", "made", "regex", "lark")
MIN_ENDED, MIN_COMPILED = 80.0, 85.0  # percent
MAX_LARK_TOKENS = 80  # of an ambiguous text `lark` keeps every reading: longer ones take gigabytes
CLOSING_TRIES, CLOSING_TOKENS = 100, 400
EXAMPLES, MAX_EXAMPLES, MAX_TAIL, MAX_NESTED = 16, 3, 30, 40
_OPTIONS = {"json_schema": "schema", "regex": "regex", "lark": "grammar"}


@dataclass
class Answer:
    """What became of one grammar."""

    grammar: CorpusGrammar
    refused: str = ""
    stuck: str = ""  # ended by an error after it had begun
    ended: bool = False
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    complaint: str = ""  # of the judge


class Beginnings:
    """Continues what was cut off, with an engine of its own."""

    def __init__(self) -> None:
        with closing(GgufCheckpoint(default_model())) as checkpoint:
            files = tokenizer_from_gguf(checkpoint.file)
            vocabulary, ends = checkpoint.spec.vocab_size, tuple(checkpoint.spec.eos_token_ids)
        self._engine = GrammarEngine(files.tokenizer_json, vocabulary, ends, COMPILE_FUEL, STEP_FUEL)
        self._walker = Walker(Tokenizer.from_str(files.tokenizer_json.decode()), vocabulary, ends)

    def examples(self, source: GrammarSource) -> list[str]:
        """The shortest of some texts of a grammar, in which no model had a say."""
        grammar, texts = self._engine.compile(source), set[str]()
        for seed in range(EXAMPLES):
            try:
                output, ended = self._walker.walk(
                    grammar,
                    random.Random(seed),
                    [],
                    closing_after=seed % 4,
                    max_tokens=CLOSING_TOKENS,
                    hints=_hints(source) if seed % 2 else (),
                )
            except GrammarStuck:
                continue
            texts |= {self._walker.text(output)} - {""} if ended else set()
        return sorted(texts, key=lambda text: (len(text), text))[:MAX_EXAMPLES]

    def complaint(self, answer: Answer) -> str:
        """Why what was cut off can't be shown to be a beginning; "": it is one."""
        source = answer.grammar.source
        grammar, why = self._engine.compile(source), "found no end"
        hints, cut = _hints(source), list(answer.token_ids)
        while (
            self._walker.text(cut).endswith("\N{REPLACEMENT CHARACTER}")
            and len(cut) < len(answer.token_ids) + 4
        ):
            cut, _ = self._walker.walk(  # to the end of a character
                grammar, random.Random(0), cut, closing_after=len(cut) + 1, max_tokens=len(cut) + 1
            )
        examples, deepest = self.examples(source), MAX_NESTED if source.kind == "lark" else 1
        tails = [
            text[-length:] * times
            for times in range(1, deepest + 1)
            for text in examples
            for length in range(1, min(len(text), MAX_TAIL) + 1)
        ]
        for seed in range(-len(tails), CLOSING_TRIES):
            begun = cut + (self._walker.tokens(tails[seed]) if seed < 0 else [])
            try:
                output, ended = self._walker.walk(
                    grammar,
                    random.Random(seed),
                    begun,
                    closing_after=0,
                    max_tokens=len(begun) + (CLOSING_TOKENS if seed >= 0 else 1),
                    hints=hints if seed % 2 else (),
                )
            except (GrammarStuck, AssertionError) as error:
                if seed < 0:
                    continue  # what ends another text does not end this one
                return str(error)
            if ended:
                text = self._walker.text(output)
                if not text.startswith(answer.text.rstrip("\N{REPLACEMENT CHARACTER}")):
                    return "its tokens are another text"
                return complaint(source, text)
        return why


def _hints(source: GrammarSource) -> list[str]:
    """Characters and words that may lead to an end of the grammar's texts."""
    if source.kind == "json_schema":
        return list("@.a-")
    return sorted({*source.text, *"aA0", *re.findall("[a-z]{2,}", source.text)})


async def ask(
    client: aio.Client, grammar: CorpusGrammar, examples: Sequence[str], max_tokens: int, seed: int
) -> Answer:
    """One grammar, through Generate."""
    kind = grammar.source.kind
    options: dict[str, Any] = {_OPTIONS[kind]: grammar.source.text}
    try:
        [done] = await client.generate(
            messages=conversation(grammar.source, examples),
            max_tokens=min(max_tokens, MAX_LARK_TOKENS) if kind == "lark" else max_tokens,
            temperature=1.0,
            seed=seed,
            **options,
        ).collect()
    except errors.InvalidRequest as error:
        if error.metadata.get("field", "").startswith(
            "grammar."
        ):  # one of its fields; a grammar that is stuck is no field's fault
            return Answer(grammar, refused=error.message)
        return Answer(grammar, stuck=error.message)
    assert done.finished is not None
    answer = Answer(grammar, token_ids=list(done.token_ids), text=done.text)
    answer.ended = done.finished.reason is FinishReason.STOP
    return answer


async def ask_all(
    address: str, grammars: Sequence[CorpusGrammar], streams: int, max_tokens: int, first_seed: int
) -> list[Answer]:
    """All of them, so many at once."""
    queue, answers = iter(enumerate(grammars)), list[Answer]()
    beginnings = Beginnings()

    async def work(client: aio.Client) -> None:
        for number, grammar in queue:
            examples = beginnings.examples(grammar.source) if grammar.source.kind == "lark" else []
            answers.append(await ask(client, grammar, examples, max_tokens, first_seed + number))

    async with aio.Client(address) as client, asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(work(client))
    return answers


def judge(answers: Sequence[Answer]) -> None:
    """Fill in the complaints."""
    beginnings = Beginnings()
    for answer in answers:
        if answer.refused or answer.stuck:
            continue
        if answer.ended:
            answer.complaint = complaint(answer.grammar.source, answer.text)
        else:
            answer.complaint = beginnings.complaint(answer)


def report(answers: Sequence[Answer]) -> list[Line]:
    """Print the table and what is to be seen closer; the figures that have bounds."""
    print(f"{'':10} grammars  compiled   ended  valid  cut off  beginnings  stuck  tokens")
    for origin in ORIGINS:
        some = [answer for answer in answers if answer.grammar.origin == origin]
        if some:
            _print_row(origin, some)
    _print_row("all", answers)
    refused = Counter(_reason(answer.refused) for answer in answers if answer.refused)
    print("refused:", *(f"{count:4}  {why}" for why, count in refused.most_common()), sep="\n  ")
    for answer in answers:
        if answer.complaint or answer.stuck:
            why = answer.complaint or answer.stuck
            print(f"{answer.grammar.origin} {answer.grammar.name}: {why}\n    {answer.text[:200]!r}")
    lines = []
    schemas = [answer for answer in answers if answer.grammar.source.kind == "json_schema"]
    for what, some in (
        ("schemas", schemas),
        ("regexes", [a for a in answers if a.grammar.origin == "regex"]),
        ("larks", [a for a in answers if a.grammar.origin == "lark"]),
    ):
        if not some:
            continue
        tried = [answer for answer in some if not answer.refused]
        ended = [answer for answer in tried if answer.ended]
        cut = [answer for answer in tried if not answer.ended and not answer.stuck]
        lines += [
            Line(what, "compiled, %", 100 * len(tried) / len(some), MIN_COMPILED),
            Line(what, "ended by themselves, %", 100 * len(ended) / len(tried), MIN_ENDED),
            Line(what, "stuck: neither ended nor cut off", sum(bool(a.stuck) for a in tried), most=0),
            Line(what, "ended, and are none", sum(bool(a.complaint) for a in ended), most=0),
            Line(what, "cut off, and are no beginning", sum(bool(a.complaint) for a in cut), most=0),
        ]
    return lines


def _print_row(name: str, answers: Sequence[Answer]) -> None:
    tried = [answer for answer in answers if not answer.refused]
    ended = [answer for answer in tried if answer.ended]
    cut = [answer for answer in tried if not answer.ended and not answer.stuck]
    print(
        f"{name:10} {len(answers):8} {len(tried):9} {len(ended):7} "
        f"{sum(not a.complaint for a in ended):6} {len(cut):8} {sum(not a.complaint for a in cut):11} "
        f"{sum(bool(a.stuck) for a in tried):6} {sum(len(a.token_ids) for a in tried):7}"
    )


def _reason(message: str) -> str:
    """A refusal without what is particular to one schema."""
    message = re.sub(r"^grammar\.\w+: ", "", message)
    message = re.sub(r"Resource '[^']*' is not present.*", "a $ref to anything outside", message)
    message = re.sub(r"regex parse error: .*error: ", "regex: ", message)
    return re.sub(r" (while processing|json-schema:|https?:).*", "", message)[:100]


@contextmanager
def serving(address: str | None, dtype: str) -> Iterator[str]:
    """The address given, or that of a stack with the default model."""
    if address:
        yield address
        return
    model = ["--backend", "torch", "--model", str(default_model()), "--dtype", dtype, "--pages", "4096"]
    with tempfile.TemporaryDirectory() as directory, oracle_stack(Path(directory), executor=model) as stack:
        yield stack.scheduler.address


def main() -> int:
    """Parse, ask, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("address", nargs="?")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=1000)
    parser.add_argument("--kinds", default=",".join(ORIGINS))
    parser.add_argument("--every", type=int, default=1, help="take every so manieth grammar")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    kinds = set(arguments.kinds.split(","))
    grammars = [*all_regexes(), *all_larks()]
    if kinds - {"regex", "lark"}:
        grammars = all_schemas() + grammars
    grammars = [one for one in grammars if one.origin in kinds][:: arguments.every]
    began = time.monotonic()
    with serving(arguments.address, arguments.dtype) as address:
        answers = asyncio.run(
            ask_all(address, grammars, arguments.streams, arguments.max_tokens, arguments.seed)
        )
    print(f"{len(grammars)} grammars, {arguments.dtype}: {time.monotonic() - began:.0f} s")
    judge(answers)
    lines = report(answers)
    print(*lines, sep="\n")
    if arguments.json:
        found = [
            {
                "origin": a.grammar.origin,
                "name": a.grammar.name,
                "refused": a.refused,
                "stuck": a.stuck,
                "ended": a.ended,
                "tokens": len(a.token_ids),
                "complaint": a.complaint,
                "text": a.text,
            }
            for a in answers
        ]
        arguments.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return 0 if all(line.good for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
