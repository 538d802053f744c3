"""`PeftConfig`: what an adapter_config.json says. What changes the result and is not supported is refused.

Format: the LoraConfig of github.com/huggingface/peft.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from executor_service.adapters.path_pattern import PathPattern
from executor_service.adapters.weights import PARENTS
from executor_service.contract.limits import MAX_ADAPTER_RANK
from executor_service.files.fields import Fields, shown

T = TypeVar("T", int, float)

CONFIG = "adapter_config.json"

# They say how the adapter was trained or where it comes from.
_WITHOUT_EFFECT = frozenset(
    {
        "task_type",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "auto_mapping",
        "peft_version",
        "lora_dropout",
        "eva_config",
        "runtime_config",
        "megatron_core",
        "qalora_group_size",
        "ensure_weight_tying",  # of modules_to_save and of target modules that are refused
    }
)
_READ = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "bias",
        "init_lora_weights",
        "target_modules",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "exclude_modules",
    }
)
_INITIALIZATIONS = (True, False, "gaussian", "eva", "orthogonal")  # others change the model's own weights
_MAX_TARGETS = 1024
_MAX_LAYER = 1 << 16
_MAX_PATTERNS = 1024  # of ranks or of alphas: one for each linear layer of a large model
MAX_MATCHES = 1 << 19  # patterns times linear layers that the adapter changes


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Ranks, scales, and which linear layers the adapter changes."""

    rank: int  # of the layers that no pattern names
    alpha: float  # likewise
    rank_stabilized: bool
    targets: tuple[str, ...] | None  # ends of their paths; None: a pattern, so the tensors say which
    layers: frozenset[int] | None  # None: all
    excluded: PathPattern | tuple[str, ...]  # paths that are not changed, as a pattern or by their ends
    ranks: tuple[tuple[PathPattern, int], ...]  # the first pattern that fits counts
    alphas: tuple[tuple[PathPattern, float], ...]

    def covers(self, layer: int, module: str) -> bool:
        """Whether the adapter changes this linear layer; True if the tensors say."""
        if (self.layers is not None and layer not in self.layers) or self._excludes(layer, module):
            return False
        return self.targets is None or any(is_target(layer, module, target) for target in self.targets)

    def rank_of(self, layer: int, module: str) -> int:
        """The rank of this linear layer's change."""
        path = path_of(layer, module)
        return next((rank for pattern, rank in self.ranks if pattern.ends(path)), self.rank)

    def scale_of(self, layer: int, module: str, rank: int) -> float:
        """By what the product of its factors, of this rank, is multiplied."""
        path = path_of(layer, module)
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.ends(path)), self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def _excludes(self, layer: int, module: str) -> bool:
        if isinstance(self.excluded, PathPattern):
            return self.excluded.is_all_of(path_of(layer, module))
        return any(is_target(layer, module, name) for name in self.excluded)


def path_of(layer: int, module: str) -> str:
    """The path of a linear layer in the model."""
    return f"model.layers.{layer}.{PARENTS[module]}.{module}"


def is_target(layer: int, module: str, target: str) -> bool:
    """Whether an entry of target_modules means this linear layer."""
    path = path_of(layer, module)
    return path == target or path.endswith(f".{target}")


def read_config(values: dict[str, Any], max_rank: int) -> PeftConfig:
    """The config of a parsed adapter_config.json. Raises ModelError that names key and value."""
    fields = Fields(values, CONFIG)
    if values.get("peft_type") is None:
        raise fields.fault("peft_type is missing")
    fields.only("peft_type", ("LORA",))
    if fields.flag("use_dora", default=False):
        raise fields.fault("use_dora: DoRA is not supported")
    fields.only("bias", ("none",))
    fields.only("init_lora_weights", _INITIALIZATIONS)
    for key, value in values.items():
        if key not in _READ and key not in _WITHOUT_EFFECT and value:
            raise fields.fault(f"{key[:80]} is not supported")
    rank = fields.size("r", max_size=MAX_ADAPTER_RANK)
    if rank > max_rank:
        raise fields.fault(f"r is {rank}, at most {max_rank} (max_adapter_rank)")
    fields.only("layers_pattern", ("", [], "layers", ["layers"]))
    ranks = _by_pattern(fields, "rank_pattern", lambda one, key: one.size(key, max_size=MAX_ADAPTER_RANK))
    for _, each in ranks:
        if each > max_rank:
            raise fields.fault(f"rank_pattern: {each}, at most {max_rank} (max_adapter_rank)")
    return PeftConfig(
        rank,
        fields.number("lora_alpha"),
        fields.flag("use_rslora", default=False),
        _targets(fields),
        _layers(fields),
        _excluded(fields),
        ranks,
        _by_pattern(fields, "alpha_pattern", Fields.number),
    )


def _by_pattern(
    fields: Fields, key: str, read: Callable[[Fields, str], T]
) -> tuple[tuple[PathPattern, T], ...]:
    """A map of patterns to numbers, in its order."""
    values = fields.get(key, None) or {}
    if not isinstance(values, dict) or len(values) > _MAX_PATTERNS:
        raise fields.fault(f"{key} is not a map of at most {_MAX_PATTERNS} patterns")
    named = Fields(values, f"{CONFIG}: {key}")
    return tuple((_pattern(fields, key, text), read(named, text)) for text in values)


def _pattern(fields: Fields, key: str, text: str) -> PathPattern:
    try:
        return PathPattern(text)
    except ValueError as error:
        raise fields.fault(f"{key}: {error}") from None


def _excluded(fields: Fields) -> PathPattern | tuple[str, ...]:
    """What exclude_modules says."""
    names = fields.get("exclude_modules", None) or []
    if isinstance(names, str):
        return _pattern(fields, "exclude_modules", names)
    if not isinstance(names, list) or len(names) > _MAX_TARGETS or not all(isinstance(n, str) for n in names):
        raise fields.fault("exclude_modules is neither a pattern nor a list of names")
    return tuple(names)


def _targets(fields: Fields) -> tuple[str, ...] | None:
    """The ends of paths that target_modules lists; None for a pattern or "all-linear"."""
    targets = fields.get("target_modules", None)
    if targets is None:
        raise fields.fault("target_modules is missing")
    if isinstance(targets, str):
        return None
    if (
        not isinstance(targets, list)
        or not 1 <= len(targets) <= _MAX_TARGETS
        or not all(isinstance(target, str) for target in targets)
    ):
        raise fields.fault("target_modules is neither a pattern nor a list of names")
    for target in targets:
        if target.rpartition(".")[2] not in PARENTS or ".experts." in f".{target}":
            raise fields.fault(
                f"target_modules: {shown(target)} is not supported, only {', '.join(PARENTS)}, not in experts"
            )
    return tuple(targets)


def _layers(fields: Fields) -> frozenset[int] | None:
    value = fields.get("layers_to_transform", None)
    if value is None:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(type(layer) is int and 0 <= layer < _MAX_LAYER for layer in layers):
        raise fields.fault("layers_to_transform is neither a layer's number nor a list of them")
    return frozenset(layers)
