"""How a model's own files make a vector of a text: the layout of sentence-transformers, and a key of GGUF.

`modules.json` lists what a text goes through; `config_sentence_transformers.json` has prompts. A model whose
files ask for what is not computed here has no vectors at all: others would silently be different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from service_kit.logs import Log

from executor_service.backends.base import EmbeddingDefaults, EmbeddingPooling, ModelError
from executor_service.files.fields import Fields, shown
from executor_service.files.json_file import read_json, read_json_objects

MAX_PROMPTS, MAX_PROMPT_BYTES = 64, 4096

log = Log(__name__)

_MODULES = ["Transformer", "Pooling", "Normalize"]
"""What a text may go through, in this order; the last one may be missing."""
_MODES = {
    "lasttoken": EmbeddingPooling.LAST,
    "mean": EmbeddingPooling.MEAN,
    "cls": EmbeddingPooling.CLS,
}
_OLD_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Before version 6 of sentence-transformers each mode had a flag; without any of them it is the mean."""
_GGUF_KINDS = {0: None, 1: EmbeddingPooling.MEAN, 2: EmbeddingPooling.CLS, 3: EmbeddingPooling.LAST}


def embedding_from_directory(path: Path) -> EmbeddingDefaults | None:
    """What a directory says; None, with a line in the log: this executor can't make these vectors."""
    return _or_none(lambda: _defaults(path))


def embedding_from_gguf(metadata: Mapping[str, Any], where: str) -> EmbeddingDefaults | None:
    """The same of a GGUF file: `<architecture>.pooling_type`, as llama.cpp counts."""
    return _or_none(lambda: _gguf_defaults(Fields(metadata, where)))


def _or_none(read: Callable[[], EmbeddingDefaults]) -> EmbeddingDefaults | None:
    try:
        return read()
    except ModelError as error:
        log.warning("the model has no vectors here: its own can't be computed", why=str(error))
        return None


def _gguf_defaults(f: Fields) -> EmbeddingDefaults:
    key = f"{f.get('general.architecture', '')}.pooling_type"
    kind = f.get(key, 0)
    if not isinstance(kind, int) or kind not in _GGUF_KINDS:
        raise f.fault(f"{key} {shown(kind)} is not supported, only {', '.join(map(str, _GGUF_KINDS))}")
    return EmbeddingDefaults(_GGUF_KINDS[kind])


def _defaults(path: Path) -> EmbeddingDefaults:
    file = path / "modules.json"
    if not file.exists():
        return EmbeddingDefaults()
    modules = [Fields(module, file.name) for module in read_json_objects(file)]
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds not in (_MODULES, _MODULES[:2]):
        raise ModelError(f"{file.name}: {shown(', '.join(kinds))}: only {', '.join(_MODULES)} are supported")
    _check_transformer(path, modules[0])
    prompts, default = _prompts(path / "config_sentence_transformers.json")
    return EmbeddingDefaults(_pooling(path, modules[1]), kinds == _MODULES, prompts, default)


def _check_transformer(path: Path, module: Fields) -> None:
    module.only("path", ("", "."))
    file = path / "sentence_bert_config.json"
    if file.exists():
        f = Fields(read_json(file), file.name)
        f.only("do_lower_case", (False,))
        f.only("transformer_task", ("feature-extraction",))


def _pooling(path: Path, module: Fields) -> EmbeddingPooling:
    folder = str(module.get("path", ""))
    if folder in ("", ".", "..") or Path(folder).name != folder:
        raise module.fault(f"path {shown(folder)} is not the name of a folder in this directory")
    f = Fields(read_json(path / folder / "config.json"), f"{folder}/config.json")
    flagged = [mode for flag, mode in _OLD_FLAGS.items() if f.get(flag, False)]
    given = f.get("pooling_mode", flagged or ["mean"])
    mode = ", ".join(map(str, given if isinstance(given, list) else [given]))
    if mode not in _MODES:
        raise f.fault(f"pooling_mode {shown(mode)} is not supported, only {', '.join(_MODES)}")
    if mode != "lasttoken":
        f.only("include_prompt", (True,))
    return _MODES[mode]


def _prompts(file: Path) -> tuple[dict[str, str], str]:
    """All prompts by name, and the name of the one that is there by default."""
    if not file.exists():
        return {}, ""
    f = Fields(read_json(file), file.name)
    f.only("model_type", ("SentenceTransformer",))
    given, default = f.get("prompts", {}), f.get("default_prompt_name", "")
    if not isinstance(given, dict):
        raise f.fault("prompts is not an object")
    prompts = {name: "" if text is None else text for name, text in given.items()}
    if len(prompts) > MAX_PROMPTS or not all(_is_prompt(part) for pair in prompts.items() for part in pair):
        raise f.fault(f"prompts: at most {MAX_PROMPTS} texts of {MAX_PROMPT_BYTES} bytes each are supported")
    if default and not (isinstance(default, str) and default in prompts):
        raise f.fault(f"default_prompt_name {shown(default)} is none of the prompts")
    return prompts, default


def _is_prompt(value: object) -> bool:
    """Whether it is a text of a valid size; JSON may escape halves of characters, which are no text."""
    if not isinstance(value, str):
        return False
    try:
        return len(value.encode()) <= MAX_PROMPT_BYTES
    except UnicodeEncodeError:
        return False
