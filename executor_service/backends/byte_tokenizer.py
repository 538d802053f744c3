"""The tokenizer of the synthetic models: one token per byte, and an end-of-sequence token.

A byte-level BPE without merges, in the JSON format of Hugging Face's `tokenizers`: ids 0..255 are
the bytes, 256 is `<|eos|>`. Any text round-trips; any ids decode, invalid UTF-8 to U+FFFD.
"""

from __future__ import annotations

import json

from executor_service.backends.base import TokenizerBundle

EOS_ID = 256
EOS_TOKEN = "<|eos|>"
VOCAB_SIZE = 257

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_characters() -> list[str]:
    """The printable character that represents each byte in a byte-level BPE (GPT-2's mapping)."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def byte_tokenizer(chat_template: str = CHAT_TEMPLATE) -> TokenizerBundle:
    """The files of the byte tokenizer."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    eos = {"id": EOS_ID, "content": EOS_TOKEN, "special": True}
    matching = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [eos | matching],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(byte_characters())}
            | {EOS_TOKEN: EOS_ID},
            "merges": [],
        },
    }
    return TokenizerBundle(
        tokenizer_json=json.dumps(tokenizer, ensure_ascii=False).encode(),
        chat_template=chat_template,
        bos_token="",
        eos_token=EOS_TOKEN,
        add_bos=False,
    )
