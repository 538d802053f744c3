"""`ScriptedOracle`: the oracle that says what a file tells it, for tests of programs that call a model.

Pages, prefix cache, step time and injected faults are the oracle's; the output is the script's: token k of a
sequence's output is byte k of the answer to its prompt, and after the answer comes the end of sequence.
Sampling parameters do not change that, except that `min_tokens` pads with spaces. A prompt without an answer
is refused, and so is a row whose grammar forbids the answer: another output would hide the contradiction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from executor_service.backends.base import ForwardRow, RowOutput, TokenizerBundle
from executor_service.backends.byte_tokenizer import EOS_ID, EOS_TOKEN, byte_tokenizer
from executor_service.backends.oracle_backend.clocked_oracle import ClockedOracle
from executor_service.backends.oracle_backend.script import Script, ScriptedAnswer
from executor_service.backends.oracle_backend.settings import ScriptSettings
from executor_service.backends.settings import fingerprint
from executor_service.contract.masks import allowed_tokens
from executor_service.contract.plan import OutputMode, Reason, Refusal, TokenIds

# Beside what the byte tokenizer's own template has: tools and calls, as Hermes and Qwen write them.
_CHAT_TEMPLATE = (
    '{% if tools %}system: A call is <tool_call>{"name": ..., "arguments": ...}</tool_call>. Tools:'
    "{% for tool in tools %} {{ tool | tojson }}{% endfor %}{{ '\n' }}{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '\n<tool_call>\n' }}"
    "{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}"
    "{{ '\n</tool_call>' }}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_SPACE_ID = ord(" ")

# So large that no penalty, bias, temperature or noise within the contract's limits prefers another token, and
# so small that fp32 still holds the differences. The space is the second choice, where the end is excluded.
_SCRIPTED_LOGIT = np.float32(1e6)
_SPACE_LOGIT = np.float32(5e5)


class ScriptedOracle(ClockedOracle):
    """The oracle with scripted outputs."""

    def __init__(self, config: ScriptSettings) -> None:
        """Raises ModelError for a script that can't be read."""
        assert config.script is not None
        super().__init__(config)
        self._script = script = Script.read(config.script)
        settings = {"script": script.content, "vocab_size": config.vocab_size}
        self.info = replace(
            self.info,
            name="script",
            architecture="script",
            fingerprint=fingerprint("script", settings),
            can_forward=False,  # the output depends on where the prompt ends, which Forward does not know
        )

    def tokenizer(self) -> TokenizerBundle:
        """The byte tokenizer, with a chat template that takes tools."""
        return byte_tokenizer(_CHAT_TEMPLATE)

    def _sample(self, logits: NDArray[np.float32], rows: Sequence[ForwardRow]) -> list[RowOutput]:
        """The scripted outputs: the oracle's logits count only where they are not finite."""
        end = 0
        for row in rows:
            begin, end = end, end + row.outputs
            if np.isfinite(logits[begin:end]).all():
                logits[begin:end] = self._scripted(row)
        outputs = super()._sample(logits, rows)
        for index, row in enumerate(rows):
            if (refusal := self._refusal(row)) is not None:
                outputs[index] = RowOutput(finite=False, refusal=refusal)
        return outputs

    def _scripted(self, row: ForwardRow) -> NDArray[np.float32]:
        """Logits [outputs, V] of the row; equal for all ids where the script says nothing."""
        logits = np.zeros((row.outputs, self.info.vocab_size), np.float32)
        answer = self._answer(row)
        for position, length in enumerate(_output_lengths(row)):
            if answer is not None and length >= 0:
                logits[position, _SPACE_ID] = _SPACE_LOGIT
                logits[position, _token(answer, length)] = _SCRIPTED_LOGIT
        return logits

    def _answer(self, row: ForwardRow) -> ScriptedAnswer | None:
        """The answer to the row's prompt; None: there is none, or the prompt is not complete yet."""
        if not row.outputs or len(row.history) < row.prompt_length:
            return None
        return self._script.find(_text(row.history[: row.prompt_length]))

    def _refusal(self, row: ForwardRow) -> Refusal | None:
        """Why the row has no output; None: it has one."""
        if not row.outputs or len(row.history) < row.prompt_length:
            return None
        answer = self._answer(row)
        if answer is None:
            prompt = _text(row.history[: row.prompt_length])
            return Refusal(Reason.INVALID, self._script.no_answer(prompt))
        if row.masks is None or row.output is not OutputMode.SAMPLE:
            return None
        allowed = allowed_tokens(row.masks, self.info.vocab_size)
        output = row.history[row.prompt_length :]
        for length, mask in zip(_output_lengths(row), allowed, strict=True):
            if length < 0 or not _follows(answer, output[:length]):
                return None  # after a draft that is wrong: the mask is not one of the script's text
            if not mask[_token(answer, length)]:
                return self._contradiction(answer, length)
        return None

    def _contradiction(self, answer: ScriptedAnswer, length: int) -> Refusal:
        said = answer.text[:length].decode(errors="replace")
        token = _token(answer, length)
        what = "its end" if token == EOS_ID else repr(chr(token)) if token < 128 else f"byte {token}"
        return Refusal(
            Reason.GRAMMAR,
            f"script: the answer in line {answer.line} of {self._script.name} does not match the grammar:"
            f" behind {said!r}, {what} is not allowed",
        )


def _output_lengths(row: ForwardRow) -> range:
    """For each output position of the row, the length of the output before it; negative within the prompt."""
    end = len(row.history) - row.prompt_length + 1
    return range(end - row.outputs, end)


def _token(answer: ScriptedAnswer, length: int) -> int:
    """The token after the first `length` tokens of the output."""
    return answer.text[length] if length < len(answer.text) else EOS_ID


def _follows(answer: ScriptedAnswer, output: TokenIds) -> bool:
    """Whether `output` is what the answer begins with."""
    return all(token == _token(answer, length) for length, token in enumerate(output.tolist()))


def _text(tokens: TokenIds) -> str:
    """The text of a prompt; bytes that are not UTF-8 become U+FFFD."""
    if int(tokens.max(initial=0)) < EOS_ID:
        return tokens.astype(np.uint8).tobytes().decode(errors="replace")
    pieces = (EOS_TOKEN.encode() if token >= EOS_ID else bytes([token]) for token in tokens.tolist())
    return b"".join(pieces).decode(errors="replace")
