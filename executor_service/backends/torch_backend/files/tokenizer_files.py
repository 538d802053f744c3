"""`TokenizerBundle` from a model directory, or built from the metadata of a GGUF file.

`add_bos` tells whether the model expects the bos token before plain text. Encode prompts with
`add_special_tokens=False`, and put bos first where it is True; texts of embeddings get all tokens that the
post-processor of tokenizer.json adds. Pre-tokenizer names are llama.cpp's
(`tokenizer.ggml.pre`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from service_kit.logs import Log
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer
from tokenizers.processors import PostProcessor

from executor_service.backends.base import ModelError, TokenizerBundle
from executor_service.backends.torch_backend.files.generation import (
    GENERATION_CONFIG,
    generation_defaults,
    gguf_defaults,
    name_ignored,
)
from executor_service.backends.torch_backend.files.gguf_file import GgufFile
from executor_service.files.json_file import check_separators, read_bounded, read_json

log = Log(__name__)

_MAX_TOKENIZER_BYTES = 64 << 20
_MAX_TOKENIZER_SEPARATORS = 4 << 20
"""Commas and colons of tokenizer.json; 262,144 tokens and 600,000 merges as pairs have 1.7 million."""
_MAX_TEMPLATE_BYTES = 1 << 20
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types that are matched before the text is split

# The published split patterns of Llama 3 and Qwen2; they differ in how many digits make a group.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Of Seed-Coder and Seed-OSS: as Qwen2's, but a line's end belongs to no punctuation before it.
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Of gpt-oss (o200k) and MiniMax-M2, and Mistral's (tekken): a word ends before an upper case letter, too.
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _O200K.replace(_SHORT, "").replace(r"\p{N}{1,3}", r"\p{N}")
# Of HunYuan and DeepSeek V3: numbers are cut first, then Chinese and Japanese, then the rest.
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def _split(*patterns: str) -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _smollm() -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


_PRE_TOKENIZERS: Mapping[str, Callable[[], PreTokenizer]] = {
    **dict.fromkeys(("smollm", "refact", "exaone"), _smollm),  # refact: Granite's
    **dict.fromkeys(("gpt-2", "exaone4", "olmo"), lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)),
    **dict.fromkeys(("llama-bpe", "dbrx", "glm4", "chatglm-bpe"), lambda: _split(_LLAMA3)),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), lambda: _split(_O200K)),
    "tekken": lambda: _split(_TEKKEN),
    "seed-coder": lambda: _split(_SEED),
    "hunyuan-dense": lambda: _split(*_DEEPSEEK3),
    **dict.fromkeys(("qwen2", "hunyuan"), lambda: _split(_QWEN2)),
}
_NORMALIZED = ("qwen2", "olmo", "hunyuan")  # to NFC
_WHOLE = ("llama-bpe", "tekken")
"""Words of the vocabulary are tokens, whatever the merges say, and a text has bos unless the file says no."""


def tokenizer_from_directory(path: Path) -> TokenizerBundle:
    """Read tokenizer.json, tokenizer_config.json and the chat template. Raises ModelError."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{path.name}: tokenizer.json is missing: the model has no tokenizer")
    raw = read_bounded(file, _MAX_TOKENIZER_BYTES)
    check_separators(raw, file.name, _MAX_TOKENIZER_SEPARATORS)
    try:
        tokenizer = Tokenizer.from_str(_unnormalized(raw))
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and PanicException, which is none
        raise ModelError(f"tokenizer.json: {error}") from None
    config = _optional_json(path / "tokenizer_config.json")
    bos, eos = (_token_text(config.get(key)) for key in ("bos_token", "eos_token"))
    return TokenizerBundle(
        tokenizer_json=raw,
        chat_template=_chat_template(path, config),
        bos_token=bos,
        eos_token=eos,
        add_bos=bool(bos) and _begins_with(tokenizer) == tokenizer.token_to_id(bos) is not None,
        generation_defaults=_generation_defaults(path),
    )


def _unnormalized(raw: bytes) -> str:
    """A tokenizer.json at whose reading no added token is normalized: a hostile normalizer takes any time."""
    tokenizer = json.loads(raw)
    for token in tokenizer.get("added_tokens") or ():
        token["normalized"] = False
    return json.dumps(tokenizer)


def _begins_with(tokenizer: Tokenizer) -> int | None:
    """The id that the post-processor puts before a text, or None.

    It is read, since no text is tokenized in this process: a hostile tokenizer takes any time and memory.
    """
    processor = tokenizer.post_processor
    return None if processor is None else _added_first(json.loads(processor.__getstate__()))


def _added_first(processor: Mapping[str, Any]) -> int | None:
    """As `_begins_with`; of a sequence it is the last processor's that adds one."""
    match processor:
        case {"type": "Sequence", "processors": [*steps]}:
            found = (_added_first(step) for step in reversed(steps))
            return next((id_ for id_ in found if id_ is not None), None)
        case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": name}}, *_]}:
            ids = processor["special_tokens"].get(name, {}).get("ids")
            return int(ids[0]) if ids else None
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, int(id_)]}:
            return id_
    return None


def _generation_defaults(path: Path) -> dict[str, float]:
    """What generation_config.json says. As in transformers, config.json stands in where it is missing."""
    file = path / GENERATION_CONFIG
    if file.exists():
        config = read_json(file)
        name_ignored(config, file.name)
        return generation_defaults(config, file.name)
    name_ignored(_optional_json(path / "config.json"), "config.json")
    return generation_defaults({}, file.name)


def tokenizer_from_gguf(file: GgufFile) -> TokenizerBundle:
    """Build a byte-level BPE tokenizer from GGUF metadata. Raises ModelError."""
    meta = file.metadata
    kind = meta.get("tokenizer.ggml.model")
    if kind is None:
        raise file.fault("tokenizer.ggml.model is missing: the file has no tokenizer")
    if kind != "gpt2":
        raise file.fault(
            f"the tokenizer model {str(kind)[:40]!r} is not supported, only gpt2 (byte-level BPE)"
        )
    pre = meta.get("tokenizer.ggml.pre", "gpt-2")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise file.fault(
            f"the pre-tokenizer {str(pre)[:40]!r} is not supported, only {', '.join(_PRE_TOKENIZERS)}"
        )
    tokens = _strings(file, "tokenizer.ggml.tokens")
    merges: Any = [tuple(merge.split(" ")) for merge in _strings(file, "tokenizer.ggml.merges")]
    types = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise file.fault("tokenizer.ggml.token_type does not fit tokenizer.ggml.tokens")
    try:
        model = BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=pre in _WHOLE)
    except Exception as error:  # the library raises bare Exception
        raise file.fault(f"tokenizer.ggml.merges: {error}") from None
    tokenizer = Tokenizer(model)
    if pre in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(  # in one call: each call goes through all that were added before
        [
            AddedToken(token, normalized=False, special=token_type == _CONTROL)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in (_CONTROL, _USER_DEFINED)
        ]
    )
    bos, eos = _token_of(file, tokens, "bos"), _token_of(file, tokens, "eos")
    add_bos = bool(meta.get("tokenizer.ggml.add_bos_token", pre in _WHOLE)) and bool(bos)
    add_eos = bool(meta.get("tokenizer.ggml.add_eos_token", False)) and bool(eos)
    tokenizer.post_processor = _post_processor(meta, bos if add_bos else "", eos if add_eos else "")
    return TokenizerBundle(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=str(meta.get("tokenizer.chat_template") or ""),
        bos_token=bos,
        eos_token=eos,
        add_bos=add_bos,
        generation_defaults=gguf_defaults(meta, file.path.name),
    )


def _post_processor(meta: Mapping[str, Any], begin: str, end: str) -> PostProcessor:
    """Puts the bos token before a text and the eos token after it, as far as they are given."""
    added = [(which, token) for which, token in (("bos", begin), ("eos", end)) if token]
    return processors.TemplateProcessing(
        single=[*(["bos"] if begin else []), "$A", *(["eos"] if end else [])],
        special_tokens=[
            {"id": which, "ids": [meta[f"tokenizer.ggml.{which}_token_id"]], "tokens": [token]}
            for which, token in added
        ],
    )


def _strings(file: GgufFile, key: str) -> list[str]:
    values = file.metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise file.fault(f"{key} is missing or not a list of strings")
    return values


def _token_of(file: GgufFile, tokens: list[str], which: str) -> str:
    index = file.metadata.get(f"tokenizer.ggml.{which}_token_id")
    if index is None:
        return ""
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise file.fault(f"tokenizer.ggml.{which}_token_id lies outside of the vocabulary")
    return tokens[index]


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _token_text(value: Any) -> str:
    if isinstance(value, Mapping):  # a serialized AddedToken
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _chat_template(path: Path, config: Mapping[str, Any]) -> str:
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return read_bounded(file, _MAX_TEMPLATE_BYTES).decode("utf-8")
        except (ModelError, UnicodeDecodeError) as error:
            log.warning("the model has no chats: its template can't be read", file=file.name, why=str(error))
            return ""
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates, each with a name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else ""
