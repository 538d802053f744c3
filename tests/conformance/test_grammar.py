"""Sampling.grammar: the output is one of its texts, whatever way a sequence went there.

The kit knows no grammar engine. Its grammars are small enough to be read with `re`, and what is allowed is
found out from the executor itself: by opening the same output anew.
"""

from __future__ import annotations

import json
import re

import grpc
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import NONE, Executor, Sequence, Session, decode_together, fork
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.expect import refused
from tests.conformance.kit.judge import Judge
from tests.conformance.kit.vocabulary import ByteVocabulary
from tests.conformance.test_masks import under

pytestmark = pytest.mark.needs("GRAMMAR", "TOKENIZER")

OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
def words(executor: Executor) -> ByteVocabulary:
    """Tokens to text and back."""
    pieces = executor.tokenizer()
    try:
        return ByteVocabulary(b"".join(piece.tokenizer_json for piece in pieces))
    except ValueError as error:
        pytest.skip(str(error))


def rules(draw: Draw, temperature: float = 1.0, **grammar: object) -> pb.Sampling:
    return pb.Sampling(temperature=temperature, seed=draw.seed(), grammar=pb.Grammar(**grammar))  # type: ignore[arg-type]


def output(sequence: Sequence) -> list[int]:
    return [*sequence.cached, *sequence.pending][sequence.prompt_length :]


def again(session: Session, sequence: Sequence, length: int) -> list[int]:
    """What an opening with the first tokens of the sequence's output samples."""
    tokens = [*sequence.cached, *sequence.pending][: sequence.prompt_length + length]
    twin = session.open(tokens, prompt_length=sequence.prompt_length, sampling=sequence.sampling)
    session.release(twin)
    return twin.emitted


def check_replay(session: Session, sequence: Sequence, judge: Judge, outputs: int | None = None) -> None:
    """Each token that was sampled is the one that an opening with the output before it samples.

    `outputs`: how many stand at the end of the sequence; all that it emitted, if none was replaced.
    """
    if not judge.exact and sequence.sampling.temperature:
        return  # rounding may choose another
    tokens = output(sequence)
    emitted = len(sequence.emitted) if outputs is None else outputs
    for length in range(max(len(tokens) - emitted, 0), len(tokens)):
        assert again(session, sequence, length) == tokens[length : length + 1], f"output token {length}"


KINDS: dict[str, tuple[pb.Grammar, str]] = {
    "regex": (pb.Grammar(regex="[a-c]{2}(-[0-9]{3})+!"), r"[a-c]{2}(-[0-9]{3})+!"),
    "choices": (pb.Grammar(choices=pb.GrammarChoices(choices=["one", "two", "o.*"])), r"one|two|o\.\*"),
    "lark": (pb.Grammar(lark='start: "(" start ")" | /[xy]+/ ";"'), r"\(*[xy]+;\)*"),
    "json_schema": (
        pb.Grammar(
            json_schema=json.dumps(
                {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
                    "required": ["a", "b"],
                    "additionalProperties": False,
                }
            )
        ),
        r'\{"a": -?(0|[1-9][0-9]*), "b": ("x"|"yy")\}',
    ),
    "structural_tag": (
        pb.Grammar(
            structural_tag=json.dumps(
                {"structures": [{"begin": "a", "lark": "start: /[0-9]/", "end": "z"}], "triggers": ["a"]}
            )
        ),
        r"([^a]|a[0-9]z)*",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_ends_is_a_text_of_the_grammar(
    session: Session, draw: Draw, words: ByteVocabulary, kind: str
) -> None:
    """And whatever does not end in time can still become one."""
    grammar, pattern = KINDS[kind]
    ends = set(session.executor.info.model.eos_token_ids)
    sequences = [
        session.open(draw.prompt(), sampling=pb.Sampling(temperature=1.0, seed=draw.seed(), grammar=grammar))
        for _ in range(4)
    ]
    going = sequences
    while going and len(going[0].emitted) < 40:
        decode_together(going, 1)
        going = [sequence for sequence in going if not ends & set(sequence.emitted)]
    for sequence in (sequence for sequence in sequences if sequence not in going):
        assert sequence.emitted[-1] in ends
        assert re.fullmatch(pattern, words.text(sequence.emitted), re.DOTALL)
        assert set(sequence.decode(2)) <= ends, "something stands behind the end"


def test_tokens_are_the_best_of_those_allowed(
    session: Session, draw: Draw, judge: Judge, words: ByteVocabulary
) -> None:
    sampling = rules(draw, regex="[a-f]([0-9]{2}[g-k])*")
    sequence = session.open(draw.prompt(), sampling=sampling)
    sequence.decode(8)
    known = [*sequence.cached, *sequence.pending]
    digits, letters = words.tokens("0123456789"), words.tokens("ghijk")
    turns = [words.tokens("abcdef"), *[digits, digits, letters] * 3]
    ends = list(session.executor.info.model.eos_token_ids)
    free = pb.Sampling(temperature=1.0, seed=sampling.seed)
    for place, allowed in zip(range(sequence.prompt_length, len(known)), turns, strict=False):
        behind = place - sequence.prompt_length
        also = ends if behind and (behind - 1) % 3 == 0 else []
        bound = under(free, session.executor.vocab, *allowed, *also)
        judge.check_tokens(known[: place + 1], place, bound, sequence.prompt_length)
        if known[place] in ends:
            break


def test_the_state_is_a_replay_of_the_output_not_of_the_prompt(
    session: Session, draw: Draw, judge: Judge, words: ByteVocabulary
) -> None:
    """A prompt that ends like a text of the grammar has nothing to do with it."""
    prompt = [*draw.prompt(), *words.tokens("abc")]
    sequence = session.open(prompt, sampling=rules(draw, regex="abc[0-9]{6}x"))
    sequence.decode(8)
    assert words.text(sequence.emitted).startswith("abc")
    check_replay(session, sequence, judge)
    resumed = session.open(
        [*prompt, *words.tokens("abc12")],
        prompt_length=len(prompt),
        sampling=rules(draw, regex="abc[0-9]{6}x"),
    )
    resumed.decode(4)
    assert re.fullmatch("[0-9]{4}x", words.text(resumed.emitted))


def test_drafts_change_nothing(session: Session, draw: Draw, judge: Judge, words: ByteVocabulary) -> None:
    """Right ones, wrong ones, illegal ones; and what stands behind them."""
    sampling = rules(draw, regex="([a-d][0-9]{2},)*")
    prompt = draw.prompt()
    plain = session.open(prompt, sampling=sampling)
    plain.decode(23)
    illegal = words.tokens("@@")
    sequence = session.open(prompt, sampling=sampling)
    for turn in range(8):
        done = len(sequence.emitted)
        right = plain.emitted[done : done + turn % 4]
        legal_but_wrong = words.tokens(",") if len(right) % 2 else []
        n = sequence.n
        reply = sequence.verify([*right, *legal_but_wrong, *illegal] if turn % 3 else right or illegal)
        assert sequence.n == n + len(reply.tokens)
        if judge.exact:
            assert sequence.emitted == plain.emitted[: len(sequence.emitted)]
        if len(sequence.emitted) > 16:
            break
    check_replay(session, sequence, judge)


def test_rejected_drafts_leave_no_trace(
    session: Session, draw: Draw, judge: Judge, words: ByteVocabulary
) -> None:
    """Legal drafts that were not sampled: afterwards the state is that of what was."""
    sequence = session.open(draw.prompt(), sampling=rules(draw, regex="[a-z]{3}([0-9]+;)*"))
    for _ in range(5):
        (first,) = again(session, sequence, len(output(sequence)))
        other = next(token for token in words.tokens("ab01") if token != first)
        sequence.verify([other, *words.tokens("012;")])
    sequence.decode(6)
    assert re.fullmatch(r"[a-z]{3}([0-9]+;)*[0-9]*", words.text(sequence.emitted[:11]))
    check_replay(session, sequence, judge)


def test_a_fork_goes_on_where_it_was_cut(
    session: Session, draw: Draw, judge: Judge, words: ByteVocabulary
) -> None:
    sampling = rules(draw, regex="ab[0-9]{4}cd[0-9]{4}e")
    source = session.open(draw.prompt(), sampling=sampling)
    source.decode(9)
    for length in (1, 4, 7):
        copy = session.fork(source, source.prompt_length + length, rules(draw, regex="ab[0-9]{4}cd[0-9]{4}e"))
        copy.feed(tokens=output(source)[length : length + 1])
        copy.decode(5)
        whole = words.text([*output(source)[: length + 1], *copy.emitted])
        assert re.fullmatch("ab[0-9]{4}cd[0-9]{4}e"[: len("ab[0-9]{4}cd[0-9]{4}e")], whole) or len(whole) < 13
        check_replay(session, copy, judge)
    free = session.fork(source, source.prompt_length + 2, pb.Sampling(temperature=1.0, seed=draw.seed()))
    free.feed(tokens=words.tokens("@"))
    free.decode(1)
    judge.check(free, outputs=2)
    other = fork(source.id, session.new_id(), source.prompt_length + 2, rules(draw, regex="x+"))
    assert session.step(ops=[other]).ops[0].code is INVALID


def test_a_cut_goes_back_in_the_grammar(
    session: Session, draw: Draw, judge: Judge, words: ByteVocabulary
) -> None:
    sequence = session.open(draw.prompt(), sampling=rules(draw, regex="a[0-9]{3}b[0-9]{3}c"))
    sequence.decode(7)
    for keep in (6, 3, 0):
        tokens = output(sequence)
        sequence.truncate(sequence.prompt_length + keep)
        sequence.feed(tokens=tokens[keep : keep + 1])
        sequence.decode(2)
        assert re.match("a[0-9]{0,3}(b[0-9]{0,3}c?)?", words.text(output(sequence)))
        check_replay(session, sequence, judge)


def test_several_steps_and_chunks_follow_it_too(
    session: Session, draw: Draw, judge: Judge, words: ByteVocabulary
) -> None:
    sampling = rules(draw, regex="([a-d][0-9]{2},)*")
    prompt = draw.prompt()
    plain = session.open(prompt, sampling=sampling)
    plain.decode(11)
    chunked = session.open(prompt, sampling=sampling, limit=5)
    while not chunked.emitted:
        chunked.feed(limit=4)
    if session.executor.can("MULTI_STEP"):
        chunked.feed("BatchDecode", steps=5)
        chunked.feed("BatchDecode", steps=6)
    check_replay(session, chunked, judge)
    if judge.exact:
        ends = set(session.executor.info.model.eos_token_ids)
        shared = min(len(plain.emitted), len(chunked.emitted))
        assert chunked.emitted[:shared] == plain.emitted[:shared] or ends & set(plain.emitted)


def test_forced_tokens_are_hints_that_are_accepted(
    session: Session, draw: Draw, words: ByteVocabulary
) -> None:
    sequence = session.open(draw.prompt(), sampling=rules(draw, regex="[ab]-forced-[0-9]"))
    forced = list(sequence.last.detail.forced_tokens)
    said = words.text(sequence.emitted) + words.text(forced)
    assert said[:1] in ("a", "b")
    assert "-forced-".startswith(said[1:])
    if forced:
        assert sequence.verify(forced).tokens[: len(forced)] == forced


def test_given_output_that_is_not_allowed_refuses_its_row(
    session: Session, draw: Draw, judge: Judge, words: ByteVocabulary
) -> None:
    sampling = rules(draw, regex="ab[0-9]{9}")
    prompt = draw.prompt()
    sequence, free = session.open(prompt, sampling=sampling), session.open(draw.short())
    rows = [sequence.row(tokens=words.tokens("abx")), free.row()]
    illegal = session.opening([*prompt, *words.tokens("ax")], prompt_length=len(prompt), sampling=sampling)
    legal = session.opening([*prompt, *words.tokens("ab1")], prompt_length=len(prompt), sampling=sampling)
    reply = session.step(rows, [illegal, legal])
    assert [row.code for row in reply.rows] == [INVALID, OK, INVALID, OK]
    assert [row.reason for row in reply.rows] == [pb.ERROR_REASON_GRAMMAR, 0, pb.ERROR_REASON_GRAMMAR, 0]
    free.took(rows[1], reply.rows[1])
    judge.check(free)
    silent = session.step([sequence.row(tokens=words.tokens("x"), output=NONE)]).rows[0]
    assert silent.code is INVALID
    sequence.feed(tokens=words.tokens("ab12"))
    assert re.fullmatch("[0-9]", words.text(sequence.emitted[-1:]))


def test_neighbours_go_on_as_without_it(
    session: Session, draw: Draw, judge: Judge, words: ByteVocabulary
) -> None:
    bound = session.open(draw.short(), sampling=rules(draw, regex="[a-z]+"))
    free = [
        session.open(draw.short(), sampling=pb.Sampling(temperature=1.0, seed=draw.seed())) for _ in range(3)
    ]
    decode_together([free[0], bound, free[1], free[2]], 6)
    for sequence in free:
        judge.check(sequence)
    check_replay(session, bound, judge)


def test_min_tokens_gives_way_and_the_grammar_never(
    session: Session, draw: Draw, words: ByteVocabulary
) -> None:
    ends = list(session.executor.info.model.eos_token_ids)
    sampling = rules(draw, regex="ab?")
    sampling.stop_token_ids.extend(ends)
    sampling.min_tokens = 9
    sequence = session.open(draw.prompt(), sampling=sampling)
    sequence.decode(2)
    assert words.text(sequence.emitted[:2]) == "ab", "the end is masked while something else is allowed"
    assert sequence.emitted[2] in ends


@pytest.mark.needs("GRAMMAR_BEGIN")
def test_a_grammar_that_begins_behind_a_token_allows_anything_but_the_end_before_it(
    session: Session, draw: Draw, judge: Judge, words: ByteVocabulary
) -> None:
    """And is that of the output behind the first such token, whatever the prompt has."""
    (begin,) = words.tokens("!")
    ends = list(session.executor.info.model.eos_token_ids)
    sampling = rules(draw, regex="![0-9]{4}x", begins_after=begin)
    prompt = [*draw.prompt(), begin, *words.tokens("!12")]
    sequence = session.open(prompt, sampling=sampling)
    sequence.decode(5)
    free = [token for token in range(session.executor.vocab) if token not in ends]
    known = [*sequence.cached, *sequence.pending]
    bound = under(pb.Sampling(temperature=1.0, seed=sampling.seed), session.executor.vocab, *free)
    for place in range(len(prompt), len(known)):
        if begin in known[len(prompt) : place]:
            break
        judge.check_tokens(known[: place + 1], place, bound, sequence.prompt_length)
    if begin not in output(sequence):
        sequence.feed(tokens=[begin])
    sequence.decode(7)
    behind = output(sequence)[output(sequence).index(begin) + 1 :]
    assert re.fullmatch("![0-9]{4}x", words.text(behind[:6]))
    assert set(behind[6:]) <= set(ends)
    check_replay(session, sequence, judge, 6)
    tempted = rules(draw, regex="[0-9]x", begins_after=begin)
    tempted.logit_bias[ends[0]] = 1000
    assert not set(session.open(prompt, sampling=tempted).decode(2)) & set(ends)


@pytest.mark.needs("GRAMMAR_BEGIN")
def test_drafts_across_the_beginning_and_a_cut_before_it(
    session: Session, draw: Draw, judge: Judge, words: ByteVocabulary
) -> None:
    (begin,) = words.tokens("!")
    prompt, sampling = draw.prompt(), rules(draw, regex="[0-9]{6}x", begins_after=begin)
    sequence = session.open(prompt, sampling=sampling)
    given_ = [*words.tokens("ab"), begin, *words.tokens("1")]
    sequence.feed(tokens=given_)
    sequence.decode(2)
    assert re.fullmatch("[0-9]{3}", words.text(sequence.emitted[-3:]))
    check_replay(session, sequence, judge, 3)
    sequence.truncate(sequence.prompt_length)
    sequence.feed(tokens=given_[:1])
    for _ in range(3):
        (first,) = again(session, sequence, len(output(sequence)))
        reply = sequence.verify([first, begin, *words.tokens("77@")])
        assert begin in output(sequence) or not reply.detail.forced_tokens
        check_replay(session, sequence, judge, len(reply.tokens))
    early = session.opening(
        [*prompt, session.executor.info.model.eos_token_ids[0]], prompt_length=len(prompt), sampling=sampling
    )
    beyond = pb.Sampling(grammar=pb.Grammar(regex="a", begins_after=session.executor.vocab))
    refusals = session.step(openings=[early, session.opening(prompt, sampling=beyond)]).rows
    assert [row.code for row in refusals] == [INVALID, INVALID]
    assert "begins_after" in refusals[1].message


BAD = {
    "nothing set": (pb.Grammar(), "grammar"),
    "an open group": (pb.Grammar(regex="(a|"), "regex"),
    "no lark": (pb.Grammar(lark="start: ]"), "lark"),
    "no json": (pb.Grammar(json_schema="{"), "json_schema"),
    "a contradiction": (
        pb.Grammar(json_schema='{"type": "integer", "minimum": 2, "maximum": 1}'),
        "json_schema",
    ),
    "a reference to the network": (
        pb.Grammar(json_schema='{"$ref": "https://example.com/schema.json"}'),
        "json_schema",
    ),
    "no choices": (pb.Grammar(choices=pb.GrammarChoices()), "choices"),
    "an empty text": (pb.Grammar(regex=""), "grammar"),
    "no tag": (pb.Grammar(structural_tag="[]"), "structural_tag"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_compiled_refuses_its_row_and_check_grammar(
    session: Session, draw: Draw, judge: Judge, name: str
) -> None:
    grammar, told = BAD[name]
    source = session.open(draw.short())
    bad = pb.Sampling(grammar=grammar)
    opening = session.opening(draw.prompt(), sampling=bad)
    reply = session.step([source.row()], [opening], [fork(source.id, session.new_id(), 1, bad)])
    assert [row.code for row in reply.rows] == [OK, INVALID]
    assert told in reply.rows[1].message
    assert "sampling.grammar" in reply.rows[1].message
    assert reply.ops[0].code is INVALID
    source.took(source.row(), reply.rows[0])
    judge.check(source)
    request = pb.CheckGrammarRequest(grammar=grammar)
    assert refused(session.executor.call, "CheckGrammar", request) is INVALID


def test_too_many_bytes_are_refused_as_such(session: Session, draw: Draw) -> None:
    grammar = pb.Grammar(regex="a" * (session.executor.limits.max_grammar_bytes + 1))
    opening = session.opening(draw.prompt(), sampling=pb.Sampling(grammar=grammar))
    (row,) = session.step(openings=[opening]).rows
    assert (row.code, row.reason) == (INVALID, pb.ERROR_REASON_TOO_LARGE)
    assert "max_grammar_bytes" in row.message


def test_check_grammar_takes_what_an_opening_takes(executor: Executor) -> None:
    for grammar, _ in KINDS.values():
        executor.call("CheckGrammar", pb.CheckGrammarRequest(grammar=grammar))


def test_the_engine_is_named(executor: Executor) -> None:
    assert executor.info.fingerprints.grammar
    assert executor.limits.max_grammar_bytes >= 1024
