"""Small tokenizers of the kinds that models bring along, made without any download."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = "hello world, the quick brown fox naïve 日本語 テスト 😀 <|x|>"


@functools.cache
def byte_level() -> Tokenizer:
    """Byte-level BPE with every byte, special and added tokens (GPT-2, Llama 3, Qwen, SmolLM)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_tokens(["<think>", "é x", "né", "日本", " sp"])
    return tokenizer


@functools.cache
def byte_fallback() -> Tokenizer:
    """Sentencepiece BPE with byte fallback (Llama 2, Mistral, Gemma)."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁a", "cat", "é", "日", "s", "t"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: id_ for id_, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@functools.cache
def words() -> Tokenizer:
    """Whole words, joined by spaces: no decoder at all."""
    vocabulary = {word: id_ for id_, word in enumerate(["[UNK]", "a", "b", "naïve", "日本"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer
