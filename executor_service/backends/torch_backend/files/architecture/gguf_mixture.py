"""`mixture_from_gguf`: the experts of a model, as a GGUF file's metadata say them.

Source: llama.cpp, whose graph of an architecture has what these keys do not say.
"""

from __future__ import annotations

from executor_service.backends.torch_backend.files.architecture.family import Family, MixtureRule
from executor_service.backends.torch_backend.files.architecture.spec import MAX_EXPERTS, MoeSpec
from executor_service.files.fields import Fields

_SHARED_SIZE, _SHARED_COUNT = "expert_shared_feed_forward_length", "expert_shared_count"
_DENSE_FIRST, _SCALE, _GATING = "leading_dense_block_count", "expert_weights_scale", "expert_gating_func"
_UNSET, _SIGMOID = 0, 2  # of `_GATING`


def mixture_keys(rule: MixtureRule | None) -> tuple[str, ...]:
    """The keys that `mixture_from_gguf` reads of such a mixture; of others they must be neutral."""
    if rule is None:
        return ()
    keys = {
        _SHARED_SIZE: bool(rule.shared_size),
        _SHARED_COUNT: bool(rule.shared_count),
        _DENSE_FIRST: rule.dense_first is not None,
        **dict.fromkeys((_SCALE, _GATING), rule.corrected),
    }
    return tuple(key for key, own in keys.items() if own)


def mixture_from_gguf(f: Fields, name: str, family: Family, layers: int) -> MoeSpec | None:
    """The experts, by the keys under `name`, as in "olmoe."; None: there are none. Raises ModelError."""
    rule = family.mixture
    if rule is None:
        f.only(f"{name}.expert_count", (0,))
        f.ignore(*(f"{name}.expert_{key}" for key in ("used_count", "feed_forward_length", "weights_norm")))
        return None
    normed = f.flag(f"{name}.expert_weights_norm", default=rule.gguf_scaled)
    if not normed and rule.scaled is None:
        raise f.fault(f"{name}.expert_weights_norm false is not supported")
    dense_size = f.get(f"{name}.feed_forward_length", None)
    size = f.size(
        f"{name}.expert_feed_forward_length",
        dense_size if rule.size_field == family.inner_field else None,
    )
    scale, dense, shared = 1.0, 0, 0
    if rule.corrected:
        f.only(f"{name}.{_GATING}", (_UNSET, _SIGMOID))
        scale = f.number(f"{name}.{_SCALE}") if f.get(f"{name}.{_SCALE}", 0) else 1.0
    if rule.dense_first is not None:
        dense = f.count(f"{name}.{_DENSE_FIRST}", 0)
    if rule.shared_size:
        shared = f.size(f"{name}.{_SHARED_SIZE}", dense_size)
    elif rule.shared_count:
        shared = size * f.size(f"{name}.{_SHARED_COUNT}")
    return MoeSpec(
        experts=f.size(f"{name}.expert_count", max_size=MAX_EXPERTS),
        experts_per_token=f.size(f"{name}.expert_used_count", max_size=MAX_EXPERTS),
        intermediate_size=size,
        norm_topk_prob=normed,
        sparse_layers=frozenset(range(dense, layers)),
        clamped=rule.clamped,
        corrected=rule.corrected,
        share_scale=scale,
        shared_size=shared,
        shared_gate=rule.shared_gate,
    )
