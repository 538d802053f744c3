"""Where a model's tensors are in its files, which may name them otherwise, or hold several in one.

A model's own names are Hugging Face's of Llama, and of the architecture's own norms (`NormNames`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from executor_service.backends.torch_backend.files.architecture.families import FAMILIES
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers, Weight

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
CLASSIFIER = "score.weight"  # the head of a model for sequence classification, in directories
SINKS = "self_attn.sinks"  # of a layer
# Of experts: what is added to the sigmoids that they are chosen by, and the one that all tokens have.
CORRECTION = "mlp.gate.e_score_correction_bias"
SHARED_EXPERT, SHARED_GATE = "mlp.shared_expert.", "mlp.shared_expert_gate.weight"

_FUSED: Mapping[str, tuple[str, ...]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Linear layers that files of `Family.fused` have in one, with the parts one after the other."""
_GGUF_NAMES = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
_GGUF_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    SHARED_GATE.removesuffix(".weight"): "ffn_gate_inp_shexp",
    **{f"{SHARED_EXPERT}{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
_GGUF_OTHERS = {SINKS: "attn_sinks.weight", CORRECTION: "exp_probs_b.bias"}
_GGUF_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")  # as in `NormNames`


class Place(NamedTuple):
    """Where a tensor is stored."""

    name: str  # of the stored tensor
    rows: slice | None = None  # of the stored tensor; None: all
    all_rows: int = 0  # of the stored tensor, if it has several parts
    expert: int | None = None  # its index in a stack of experts, the first dimension


def place_in_directory(spec: ModelSpec, name: str) -> Place:
    """The place of one of the model's tensors in a Hugging Face directory."""
    if not name.startswith("model.layers."):
        return Place(name)
    place = _unfused(spec, name, FAMILIES[spec.architecture].fused)
    stored = place.name
    for ours, theirs in FAMILIES[spec.architecture].renamed:
        stored = stored.replace(ours, theirs)
    return place._replace(name=stored)


def place_in_gguf(spec: ModelSpec, name: str, fused: tuple[str, ...] = ()) -> Place:
    """The place of one of the model's tensors in a GGUF file; `fused`: layers that are so in this file."""
    if name in _GGUF_NAMES:
        return Place(_GGUF_NAMES[name])
    place = _unfused(spec, name, FAMILIES[spec.architecture].fused + fused)
    layer, stem, suffix = _split(place.name)
    if other := _GGUF_OTHERS.get(f"{stem}.{suffix}"):
        return Place(f"blk.{layer}.{other}")
    if stem in spec.norms:
        stored = _GGUF_NORMS[spec.norms.index(stem)]
    elif stem.startswith("mlp.experts."):
        _, _, expert, part = stem.split(".")
        stored = _GGUF_LAYER_NAMES["mlp." + part] + "_exps"
        place = place._replace(expert=int(expert))
    else:
        stored = _GGUF_LAYER_NAMES[stem]
    stored = dict(FAMILIES[spec.architecture].gguf_renamed).get(stored, stored)
    return place._replace(name=f"blk.{layer}.{stored}.{suffix}")


def is_rotated(name: str) -> bool:
    """Whether the rows of one of the model's tensors are elements of queries or keys."""
    return name.startswith("model.layers.") and _split(name)[1] in ("self_attn.q_proj", "self_attn.k_proj")


def _unfused(spec: ModelSpec, name: str, all_fused: tuple[str, ...]) -> Place:
    """The stored tensor that the file has instead of this one, by its own name, and the part of it."""
    layer, stem, suffix = _split(name)
    for fused in all_fused:
        parts = _FUSED[fused]
        if stem in parts:
            sizes = [_rows(spec, part) for part in parts]
            first = sum(sizes[: parts.index(stem)])
            rows = slice(first, first + _rows(spec, stem))
            return Place(f"model.layers.{layer}.{fused}.{suffix}", rows, sum(sizes))
    return Place(name)


def _split(name: str) -> tuple[str, str, str]:
    """A layer's number, the name within the layer, and "weight" or "bias"."""
    _, _, layer, rest = name.split(".", 3)
    stem, suffix = rest.rsplit(".", 1)
    return layer, stem, suffix


def _rows(spec: ModelSpec, part: str) -> int:
    if part == "self_attn.q_proj":
        return spec.heads * spec.head_dim
    if part in ("self_attn.k_proj", "self_attn.v_proj"):
        return spec.kv_heads * spec.head_dim
    return spec.intermediate_size


def order_of_halves(rows: int, head_dim: int, rotary_dim: int) -> NDArray[np.int64]:
    """Which of `rows` rows, of whole heads stored as pairs, comes where; the last ones of a head stay."""
    order = np.arange(head_dim)
    order[:rotary_dim] = order[:rotary_dim].reshape(-1, 2).T.flatten()
    places: NDArray[np.int64] = (np.arange(rows // head_dim)[:, None] * head_dim + order).flatten()
    return places


def halves_first(weight: Weight, head_dim: int, rotary_dim: int) -> Weight:
    """Rows [heads * head_dim, ...] that were stored as pairs, in the order in which they are rotated here.

    Element i of a head is rotated with element i + n / 2, as in Llama of transformers, n being the number of
    rotated elements; the last ones of a head are not rotated. Files of some architectures have them at 2i and
    2i + 1. Scores are the same in any order that queries and keys have in common, so that it is enough to
    reorder the rows once.
    """
    rows = torch.from_numpy(order_of_halves(weight.shape[0], head_dim, rotary_dim))
    if isinstance(weight, ScaledNumbers):
        minima = None if weight.minima is None else weight.minima[rows]
        return ScaledNumbers(weight.numbers[rows], weight.scales[rows], weight.groups, minima)
    return weight[rows]
