"""The scripted oracle says what its file tells, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from executor_service.backends.base import Backend, ForwardRow, ModelError, PromptOutputs, RowOutput
from executor_service.backends.byte_tokenizer import EOS_ID
from executor_service.backends.factory import make_backend
from executor_service.backends.oracle_backend.oracle import OracleBackend
from executor_service.backends.oracle_backend.script import Script
from executor_service.backends.oracle_backend.scripted_oracle import ScriptedOracle
from executor_service.backends.oracle_backend.settings import ScriptSettings
from executor_service.contract.masks import mask_bytes
from executor_service.contract.plan import Opening, OutputMode, Reason, Sampling
from tests.support.untyped import present
from tests.unit.executor.fakes import limits
from tests.unit.executor.harness import Harness
from tests.unit.executor.rows import make_row

LINES = """\
# comments and empty lines are skipped

{"message": "Why?", "text": "Because."}
{"prompt": "Once", "text": " upon é"}
{"pattern": "^O.*e$", "text": "any other"}
"""
TABLE = [3, 1, 7, 2, 5, 4]
PROMPT, OUTPUT = b"Once", " upon é".encode()
WILD = Sampling(
    temperature=100,
    seed=3,
    repetition_penalty=100,
    frequency_penalty=100,
    logit_bias=((ord("x"), 1000.0), (ord("u"), -1000.0)),
)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "script.jsonl"
    path.write_text(LINES)
    return path


@pytest.fixture
def backend(script: Path) -> ScriptedOracle:
    backend = make_backend(ScriptSettings(script=script))
    assert isinstance(backend, ScriptedOracle)
    backend.allocate(40, 4)
    return backend


def row(output: bytes, *, prompt: bytes = PROMPT, outputs: int = 1, sampling: Sampling = WILD) -> ForwardRow:
    """A row that feeds all of a sequence, and samples after its last `outputs` tokens."""
    return make_row(
        [*prompt, *output],
        TABLE,
        outputs=outputs,
        output=OutputMode.SAMPLE,
        sampling=sampling,
        prompt_length=len(prompt),
    )


def one(backend: Backend, of: ForwardRow) -> RowOutput:
    (output,) = backend.forward([of])
    return output


def tokens(output: RowOutput) -> list[int]:
    return list(present(output.tokens).tolist())


@pytest.mark.parametrize("count", range(len(OUTPUT) + 3))
def test_token_k_is_byte_k_of_the_answer_under_any_sampling_and_then_the_end(
    backend: ScriptedOracle, count: int
) -> None:
    whole = [*OUTPUT, EOS_ID, EOS_ID, EOS_ID]
    before = bytes(min(token, 255) for token in whole[:count])
    assert tokens(one(backend, row(before))) == [whole[count]]


def test_drafts_are_verified_against_the_answer(backend: ScriptedOracle) -> None:
    assert tokens(one(backend, row(OUTPUT[:5], outputs=4))) == [*OUTPUT[2:6]]


def test_scores_and_vectors_of_a_prompt_are_the_oracles(backend: ScriptedOracle) -> None:
    oracle = OracleBackend()
    oracle.allocate(40, 4)
    asked = make_row([*b"Unknown"], TABLE, outputs=0, output=OutputMode.HIDDEN)
    asked.prompt = PromptOutputs(first=3, targets=asked.history[3:], last=True)
    mine, theirs = one(backend, asked), one(oracle, asked)
    assert mine.refusal is None
    assert np.array_equal(present(mine.hidden), present(theirs.hidden))
    assert np.array_equal(present(mine.scores).logprobs, present(theirs.scores).logprobs)


def test_min_tokens_pads_with_spaces(backend: ScriptedOracle) -> None:
    longer = Sampling(stop_token_ids=(EOS_ID,), min_tokens=len(OUTPUT) + 1)
    assert tokens(one(backend, row(OUTPUT, sampling=longer))) == [ord(" ")]
    assert tokens(one(backend, row(OUTPUT + b" ", sampling=longer))) == [EOS_ID]


def test_the_first_line_that_fits_answers() -> None:
    answers = Script("script.jsonl", LINES)
    assert present(answers.find("Once")).text == OUTPUT
    assert present(answers.find("One")).text == b"any other"
    assert present(answers.find("system: Be brief.\nuser: Why?\nassistant: ")).text == b"Because."
    assert answers.find("user: And why?\nassistant: ") is None
    assert answers.find("user: Why?\nassistant: Be") is None


def test_a_prompt_that_is_not_in_the_script_is_refused_by_name_alone(script: Path) -> None:
    engine = Harness(limits(vocab_size=257), make_backend(ScriptSettings(script=script)))
    known, unknown = (
        Opening(number, np.frombuffer(prompt, np.uint8).astype(np.int32), len(prompt), 0, Sampling())
        for number, prompt in ((1, PROMPT), (2, b"Twice"))
    )
    good, bad = engine.step(known, unknown).rows
    assert good.tokens == [ord(" ")]
    refusal = present(bad.refusal)
    assert (refusal.reason, "script.jsonl has no answer for the prompt 'Twice'" in refusal.message) == (
        Reason.INVALID,
        True,
    )
    assert engine.engine.store.count == 1


def allowing(*ids: int) -> np.ndarray:
    mask = np.zeros(mask_bytes(257), np.uint8)
    for id_ in ids:
        mask[id_ // 8] |= 1 << id_ % 8
    return mask


def test_a_mask_that_forbids_the_answer_refuses_the_row_and_says_where(backend: ScriptedOracle) -> None:
    fits = row(OUTPUT[:1])
    fits.masks = allowing(ord("u"), ord("v"))[None]
    assert tokens(one(backend, fits)) == [ord("u")]
    fits.masks = allowing(ord("v"))[None]
    refusal = present(one(backend, fits).refusal)
    assert refusal.reason is Reason.GRAMMAR
    assert "line 4" in refusal.message
    assert "behind ' ', 'u' is not allowed" in refusal.message


def test_masks_behind_a_wrong_draft_say_nothing_about_the_answer(backend: ScriptedOracle) -> None:
    drafted = row(OUTPUT[:1] + b"vw", outputs=3)
    drafted.masks = np.stack([allowing(ord("u"), ord("v")), allowing(ord("w")), allowing(ord("x"))])
    assert tokens(one(backend, drafted))[0] == ord("u")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "script.jsonl:2: is not JSON"),
        ("[]", "script.jsonl:2: expected an object of strings"),
        ('{"prompt": 3, "text": ""}', "script.jsonl:2: expected an object of strings"),
        ('{"prompt": "a"}', "script.jsonl:2: expected `text` and one of prompt, message, pattern"),
        ('{"prompt": "a", "message": "b", "text": ""}', "expected `text` and one of"),
        ('{"pattern": "(", "text": ""}', "script.jsonl:2: the pattern is not a regular expression"),
        ('{"prompt": "a", "text": "\\ud800"}', "script.jsonl:2: the text is not Unicode"),
    ],
)
def test_a_malformed_line_is_named(line: str, complaint: str) -> None:
    with pytest.raises(ModelError, match="--script") as caught:
        Script("script.jsonl", f"# first\n{line}\n")
    assert complaint in str(caught.value)


def test_a_script_that_is_empty_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no answers"):
        Script("script.jsonl", "# nothing\n")
    with pytest.raises(ModelError, match="No such file"):
        Script.read(tmp_path / "missing.jsonl")
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9", "text": ""}')
    with pytest.raises(ModelError, match="byte 12 is not UTF-8"):
        Script.read(tmp_path / "latin")


def test_equal_scripts_have_equal_fingerprints_and_others_have_not(tmp_path: Path, script: Path) -> None:
    copy, other = tmp_path / "copy.jsonl", tmp_path / "other.jsonl"
    copy.write_text(LINES)
    other.write_text(LINES.replace("Because", "Why not"))
    prints = [ScriptedOracle(ScriptSettings(script=path)).info.fingerprint for path in (script, copy, other)]
    assert prints[0] == prints[1] != prints[2]
