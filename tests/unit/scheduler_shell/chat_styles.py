"""Chat formats as model families have them, each with a small tokenizer of the family's kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from scheduler_service.text.worker.encoder import Encoder, Files

WORDS = "system user assistant hello world im_start im_end the quick brown fox <|>[]/ think trim naïve 日本"


@dataclass(frozen=True)
class Style:
    """A template, and how its family tokenizes."""

    template: str
    tokenizer: Callable[[], Tokenizer]
    bos: str = ""
    eos: str = ""
    roles: tuple[str, ...] = ("user", "assistant")

    @functools.cached_property
    def control(self) -> list[str]:
        """The special tokens' texts."""
        return [
            token.content for token in self.tokenizer().get_added_tokens_decoder().values() if token.special
        ]

    @functools.cached_property
    def encoder(self) -> Encoder:
        """As the tokenizer process makes it."""
        json = self.tokenizer().to_str().encode()
        return Encoder(Files(json, self.template, self.bos, self.eos, add_bos=False))


def byte_level(special: Sequence[str | AddedToken], plain: Sequence[str] = ()) -> Callable[[], Tokenizer]:
    """Byte-level BPE (GPT-2, Llama 3, Qwen)."""

    @functools.cache
    def make() -> Tokenizer:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator([WORDS] * 3, trainer)
        tokenizer.add_special_tokens(list(special))
        tokenizer.add_tokens(list(plain))
        return tokenizer

    return make


def sentencepiece(special: Sequence[str | AddedToken], *, metaspace: bool = False) -> Callable[[], Tokenizer]:
    """BPE over characters with byte fallback, special tokens in its vocabulary (Llama 2, Mistral, Gemma)."""

    @functools.cache
    def make() -> Tokenizer:
        texts = [str(getattr(token, "content", token)) for token in special]
        pieces = [
            "<unk>",
            *texts,
            *(f"<0x{byte:02X}>" for byte in range(256)),
            "▁",
            *"abcdefghijklmnopqrstuvwxyz",
        ]
        pieces += [*"<|>[]/_", "us", "▁h", "er"]
        merges = [("u", "s"), ("▁", "h"), ("e", "r")]
        vocab = {piece: id_ for id_, piece in enumerate(pieces)}
        tokenizer = Tokenizer(
            models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
        if metaspace:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        tokenizer.add_special_tokens(["<unk>", *special])
        return tokenizer

    return make


def unigram(special: Sequence[str]) -> Callable[[], Tokenizer]:
    """Unigram, whose own pieces spell the special tokens too (T5 and the like)."""

    @functools.cache
    def make() -> Tokenizer:
        pieces = [("<unk>", 0.0), *((text, -1.0) for text in special), ("▁", -2.0)]
        pieces += [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz<|>[]/_\n:."]
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        tokenizer.add_special_tokens(["<unk>", *special])
        return tokenizer

    return make


CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>"
    "\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN3 = """\
{%- for message in messages %}
  {%- set content = message.content %}
  {%- if message.role == 'assistant' %}
    {%- set reasoning = '' %}
    {%- if message.reasoning_content is string %}
      {%- set reasoning = message.reasoning_content %}
    {%- elif '</think>' in content %}
      {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.last or reasoning %}
      {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\\n' }}
  {%- elif message.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] | trim + eos_token }}{% else %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI3 = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<|user|>\n' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}"
    "{{ '<|system|>\n' + message['content'] + eos_token }}{% else %}"
    "{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
DEFAULT = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% else %}{{ '<｜Assistant｜>' + message['content'] + eos_token }}{% endif %}{% endfor %}<｜Assistant｜>"
)
BARE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Nothing between the contents: a token may be spelt by several of them."""

_SYSTEM = ("system", "user", "assistant")
_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_RSTRIP = [
    AddedToken(text, rstrip=True, special=True)
    for text in ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
]

STYLES = {
    "ChatML": Style(CHATML, byte_level(_CHATML), roles=_SYSTEM),
    "Llama 3": Style(
        LLAMA3,
        byte_level(["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
        bos="<|begin_of_text|>",
        roles=_SYSTEM,
    ),
    "Qwen3": Style(
        QWEN3,
        byte_level(_CHATML, ["<think>", "</think>", "<tool_response>", "</tool_response>"]),
        roles=(*_SYSTEM, "tool"),
    ),
    "Mistral": Style(MISTRAL, sentencepiece(["<s>", "</s>", "[INST]", "[/INST]"]), bos="<s>", eos="</s>"),
    "Mistral, text markers": Style(
        MISTRAL, sentencepiece(["<s>", "</s>"], metaspace=True), bos="<s>", eos="</s>"
    ),
    "Gemma": Style(
        GEMMA, sentencepiece(["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]), bos="<bos>", eos="<eos>"
    ),
    "Phi-3": Style(PHI3, sentencepiece(["<s>", "</s>", "<|endoftext|>", *_RSTRIP]), roles=_SYSTEM),
    "Zephyr": Style(ZEPHYR, sentencepiece(["<s>", "</s>"]), bos="<s>", eos="</s>", roles=_SYSTEM),
    "Zephyr, first space": Style(
        ZEPHYR,
        sentencepiece(["<s>", "</s>", "<|user|>", "<|system|>", "<|assistant|>"], metaspace=True),
        bos="<s>",
        eos="</s>",
        roles=_SYSTEM,
    ),
    "default model": Style(DEFAULT, byte_level([*_CHATML, "<repo_name>", "<file_sep>"]), roles=_SYSTEM),
    "DeepSeek": Style(
        DEEPSEEK,
        byte_level(["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"], ["<｜User｜>", "<｜Assistant｜>"]),
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
    ),
    "Unigram": Style(CHATML, unigram(_CHATML), roles=_SYSTEM),
    "no markers": Style(BARE, byte_level(["<|im_start|>", "<|im_end|>", "aba", "bab"])),
}
