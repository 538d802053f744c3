"""Which files of a hub's repository are a model: its weights, and what is read beside them. No I/O.

Nothing that could be executed is among them: no Python, and no weights in pickle's format. Names are taken
only if they are plain names in the repository's own folder, or in one folder below it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import NamedTuple

from service_kit.model_name import gguf_parts, gguf_stem

from paceline.cli.models.directories import ModelFetchError

CONFIG = "config.json"
_READ_BESIDE = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "*.safetensors.index.json",
    "adapter_config.json",
    "quantize_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors",
    "README.md",
    "LICENSE*",
)
_NAME = re.compile(r"[A-Za-z0-9_][\w.+-]*(/[A-Za-z0-9_][\w.+-]*)?", re.ASCII)
_QUANTIZATION = re.compile(
    r"(?:^|[-_.])(I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|FP?16|FP?32)$", re.IGNORECASE | re.ASCII
)


class HubFile(NamedTuple):
    """A file as the hub describes it. It has one of the two digests, in hex."""

    path: str
    size: int
    sha256: str
    git_oid: str  # SHA-1 of git's blob


def quantization_of(path: str) -> str:
    """The quantization that a GGUF file's name ends with ("Q4_K_M"), else its whole stem."""
    stem = gguf_stem(PurePosixPath(path).name)
    found = _QUANTIZATION.search(stem)
    return found[1] if found else stem


def needed_files(files: Sequence[HubFile], quantization: str = "") -> list[HubFile]:
    """The files to fetch: the GGUF file that `quantization` names; else safetensors and what goes with them.

    A repository that has no safetensors and one GGUF file needs no quantization. The file that makes a
    directory a model comes last, so that an interrupted download leaves none. Raises ModelFetchError, with
    the choices where there are several.
    """
    plain = [file for file in files if _NAME.fullmatch(file.path)]
    weights = _weights(plain)
    if weights and not quantization:
        if not any(file.path in (CONFIG, "adapter_config.json") for file in plain):
            raise ModelFetchError(f"it has safetensors files, but no {CONFIG}")
        beside = [file for file in plain if _is_read(file.path) and file not in weights]
        return sorted((*weights, *beside), key=lambda file: (file.path == CONFIG, file not in weights))
    return _one_gguf(plain, quantization)


def _weights(files: Sequence[HubFile]) -> list[HubFile]:
    """The safetensors files of the format that transformers writes."""
    found = [file for file in files if fnmatchcase(file.path, "*.safetensors") and "/" not in file.path]
    usual = [file for file in found if file.path.startswith(("model", "adapter_model"))]
    return usual or [file for file in found if not file.path.startswith("consolidated")]


def _is_read(path: str) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in _READ_BESIDE)


def _one_gguf(files: Sequence[HubFile], quantization: str) -> list[HubFile]:
    """The parts of one GGUF file, of which most have one; the first comes last, which makes them a model."""
    found = [
        file
        for file in files
        if file.path.lower().endswith(".gguf") and not PurePosixPath(file.path).name.startswith("mmproj")
    ]
    wanted = [file for file in found if quantization_of(file.path).lower() == quantization.lower()]
    choices = ", ".join(sorted({f":{quantization_of(file.path)}" for file in found}))
    if not found and quantization and _weights(files):
        raise ModelFetchError(f"it has safetensors files and no GGUF files: leave out :{quantization}")
    if not found:
        raise ModelFetchError(
            "it has no safetensors and no GGUF files, which are what can be served; weights in pickle's"
            " format are not fetched"
        )
    if quantization and not wanted:
        raise ModelFetchError(f"it has no GGUF file :{quantization}; it has {choices}")
    chosen = wanted or found
    parts = gguf_parts(chosen[0].path)
    if any(file.path not in parts for file in chosen):
        raise ModelFetchError(f"it has several GGUF files: add which one to its name, of {choices}")
    listed = {file.path: file for file in found}
    if missing := [part for part in parts if part not in listed]:
        raise ModelFetchError(f"it has no {missing[0]}, a part of the GGUF file")
    return [listed[part] for part in reversed(parts)]
